"""The limit of a waiting queue, in tokens. Reads no clock.

The queue accepts another request

    - if all waiting tokens stay within the bound, or the queue is empty
    - up to twice the bound, if its tenant stays within its share of the bound or has no other request in the queue. The
      share is the bound divided by the number of waiting tenants, this one included, so that no tenant fills the queue
      for the others.
"""

from collections import Counter, deque
from collections.abc import Callable

from cpd.common.errors import QueueFullError

WINDOW_S = 10.0
"""Length of the recent past over which the rate is measured."""

MIN_MEASURED_S = 1.0
"""A queue that began to fill more recently than this has no rate yet."""

DEFAULT_RETRY_S = 1.0
"""Used if there is neither a measured rate nor a prediction."""

MAX_RETRY_S = 600.0


class QueueLimit:
    """Counts the tokens of the requests in a waiting queue.

    Args:
        predicted_s: Predicts how many seconds it takes to compute a number of tokens; 0: unknown. Used until a rate is
            measured.

    Attributes:
        tokens: Number of tokens that wait now.
    """

    def __init__(self, predicted_s: Callable[[int], float] = lambda tokens: 0.0) -> None:
        self.tokens = 0
        self._predicted_s = predicted_s
        self._by_tenant: Counter[str] = Counter()
        self._taken: deque[tuple[float, int]] = deque()
        self._taken_tokens = 0
        self._since = 0.0

    def check(self, tenant: str, tokens: int, bound: int, now: float) -> None:
        """Raises QueueFullError if the queue does not accept a request of this many tokens."""
        excess = self.tokens + tokens - bound
        if excess <= 0 or not self.tokens:
            return
        own, tenants = self._by_tenant[tenant], len(self._by_tenant.keys() | {tenant})
        over_share = own + tokens - bound // tenants
        if own and over_share > 0 and tenants > 1:
            # While others wait, one in `tenants` tokens that leave is this tenant's.
            raise QueueFullError(
                f"{own} tokens of this tenant wait in a queue of {bound} that {tenants} tenants share",
                self.seconds_for(over_share * tenants, now),
                over_share=True,
            )
        if tenants == 1 or self.tokens + tokens > 2 * bound:
            raise QueueFullError(f"{self.tokens} tokens wait in a queue of {bound}", self.seconds_for(excess, now))

    def add(self, tenant: str, tokens: int, now: float) -> None:
        """Counts a request that begins to wait."""
        if not self.tokens:
            self._since, self._taken_tokens = now, 0
            self._taken.clear()
        self.tokens += tokens
        self._by_tenant[tenant] += tokens

    def take(self, tenant: str, tokens: int, now: float) -> None:
        """Counts a request that leaves because it is scheduled."""
        self._taken.append((now, tokens))
        self._taken_tokens += tokens
        self._forget(now)
        self.remove(tenant, tokens)

    def remove(self, tenant: str, tokens: int) -> None:
        """Counts a request that leaves without being scheduled."""
        self.tokens -= tokens
        self._by_tenant[tenant] -= tokens
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def seconds_for(self, tokens: int, now: float) -> float:
        """Time until this many tokens have left, at the rate of the recent past."""
        self._forget(now)
        measured_s = now - max(self._since, now - WINDOW_S)
        if measured_s >= MIN_MEASURED_S and self._taken_tokens:
            seconds = tokens * measured_s / self._taken_tokens
        else:
            seconds = self._predicted_s(tokens) or DEFAULT_RETRY_S
        return min(seconds, MAX_RETRY_S)

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._taken_tokens -= self._taken.popleft()[1]

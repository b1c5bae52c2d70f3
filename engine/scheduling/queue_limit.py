"""The limit of a waiting queue, in tokens. Reads no clock.

The bound is a number of tokens, or as many as leave within the longest wait if that is less: at the rate of the recent
past, or else as predicted. The queue accepts another request

    - if all waiting tokens stay within the bound, or the queue is empty
    - up to twice the bound, if its tenant stays within its share of the bound or has no other request in the queue. The
      share is the bound divided by the number of waiting tenants, this one included, so that no tenant fills the queue
      for the others.
"""

from collections import deque
from collections.abc import Callable
from math import inf

from cpd.common.errors import QueueFullError

WINDOW_S = 10.0
"""Length of the recent past over which the rate is measured."""

MIN_MEASURED_S = 1.0
"""A queue that began to fill more recently than this has no rate yet."""

DEFAULT_RETRY_S = 1.0
"""Used if there is neither a measured rate nor a prediction."""

MAX_RETRY_S = 600.0

MAX_TOKENS = 1 << 60
"""More tokens than any queue has."""


class QueueLimit:
    """Counts the tokens of the requests in a waiting queue.

    Args:
        predicted_s: Predicts how many seconds it takes to compute a number of tokens; 0: unknown. Used until a rate is
            measured.
        max_wait_s: The longest wait, in seconds.

    Attributes:
        tokens: Number of tokens that wait now.
    """

    def __init__(self, predicted_s: Callable[[int], float] = lambda tokens: 0.0, *, max_wait_s: float = inf) -> None:
        self.tokens = 0
        self._predicted_s = predicted_s
        self._max_wait_s = max_wait_s
        self._by_tenant: dict[str, int] = {}
        self._taken: deque[tuple[float, int]] = deque()
        self._taken_tokens = 0
        self._since = 0.0

    def check(self, tenant: str, tokens: int, bound: int, now: float) -> None:
        """Raises QueueFullError if the queue does not accept a request of this many tokens."""
        if not self.tokens:
            return
        bound = min(bound, self._leaving_in_time(now))
        if self.tokens + tokens <= bound:
            return
        own, tenants = self._by_tenant.get(tenant, 0), len(self._by_tenant.keys() | {tenant})
        over_share = own + tokens - bound // tenants
        if own and over_share > 0 and tenants > 1:
            # while others wait, one in `tenants` tokens that leave is this tenant's
            raise QueueFullError(
                f"{own} tokens of this tenant wait in a queue of {bound} that {tenants} tenants share",
                self.seconds_for(own * tenants, now),
                over_share=True,
            )
        if tenants == 1 or self.tokens + tokens > 2 * bound:
            raise QueueFullError(f"{self.tokens} tokens wait in a queue of {bound}", self.seconds_for(self.tokens, now))

    def add(self, tenant: str, tokens: int, now: float) -> None:
        """Counts a request that begins to wait."""
        if not self.tokens:
            self._since, self._taken_tokens = now, 0
            self._taken.clear()
        self.tokens += tokens
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + tokens

    def take(self, tenant: str, tokens: int, now: float) -> None:
        """Counts a request that leaves because it is scheduled."""
        self._taken.append((now, tokens))
        self._taken_tokens += tokens
        self._forget(now)
        self.remove(tenant, tokens)

    def remove(self, tenant: str, tokens: int) -> None:
        """Counts a request that leaves without being scheduled."""
        self.tokens -= tokens
        left = self._by_tenant[tenant] - tokens
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]

    def hold(self) -> None:
        """Forgets the rate: from now on no tokens leave, until `go_on`."""
        self._taken_tokens = 0
        self._taken.clear()

    def go_on(self, now: float) -> None:
        """Begins to measure the rate: tokens leave again."""
        self._since = now

    def seconds_for(self, tokens: int, now: float) -> float:
        """Time until this many tokens have left, at the rate of the recent past."""
        rate = self._rate(now)
        seconds = tokens / rate if rate else self._predicted_s(tokens) or DEFAULT_RETRY_S
        return min(seconds, MAX_RETRY_S)

    def _leaving_in_time(self, now: float) -> int:
        """The tokens that leave within the longest wait."""
        if self._max_wait_s == inf:
            return MAX_TOKENS
        rate = self._rate(now)
        if not rate:
            predicted_s = self._predicted_s(self.tokens)
            rate = self.tokens / predicted_s if predicted_s else inf
        return int(min(rate * self._max_wait_s, MAX_TOKENS))

    def _rate(self, now: float) -> float:
        """Tokens that left per second in the recent past; 0 if not known."""
        self._forget(now)
        measured_s = now - max(self._since, now - WINDOW_S)
        return self._taken_tokens / measured_s if measured_s >= MIN_MEASURED_S else 0.0

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._taken_tokens -= self._taken.popleft()[1]

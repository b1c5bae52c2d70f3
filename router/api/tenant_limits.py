"""What each tenant may use at a time at this router: calls in flight, tokens a minute, bytes of bodies.

The routers of a cluster do not tell each other what they have admitted: each applies an equal part of the limits on
calls and tokens. Memory for bodies is each router's own, so that limit is not divided.

A tenant's tokens are a bucket that holds those of a minute and fills evenly. A call is admitted if there are any. The
tokens of its prompts are taken when it goes to a worker, those of its output at its end. So the bucket may owe some;
calls are refused until it has filled again.

A call is admitted before its body is read (`gate.py`). `completions.py` knows the length of its prompts and charges it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.api.tenants import Tenant
from router.errors import too_many

MINUTE_S = 60.0

NEW_CALLS = 0.1
"""Weight of a new call in the mean duration of a tenant's calls."""

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Use:
    """What a tenant uses now. `tokens` were left in the bucket at the time `at`."""

    tokens: float
    at: float
    calls: int = 0
    body_bytes: int = 0
    mean_call_s: float = 0.0


class Admission:
    """An API call that was admitted, until `end`.

    Attributes:
        body_bytes: Size of its body, as far as it was read; 0 once it is released.
    """

    __slots__ = ("_limits", "_since", "_tenant", "body_bytes")

    def __init__(self, limits: "TenantLimits", tenant: Tenant, since: float) -> None:
        self._limits = limits
        self._tenant = tenant
        self._since = since
        self.body_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Counts bytes of the call's body that were read.

        Raises:
            ApiError: The tenant's bodies have too many bytes (429).
        """
        use, limit = self._limits.use(self._tenant), self._tenant.limits.body_memory
        self.body_bytes += num_bytes
        use.body_bytes += num_bytes
        if limit and use.body_bytes > limit:
            message = f"Bodies of more than {limit} bytes of yours are being read or processed; try again later."
            raise too_many(message, 1.0, kind="requests")

    def release_body(self) -> None:
        """The body is not needed any more."""
        if self.body_bytes:
            self._limits.use(self._tenant).body_bytes -= self.body_bytes
            self.body_bytes = 0

    def charge(self, tokens: int) -> None:
        """Takes tokens from the tenant's bucket."""
        if self._tenant.limits.tokens_per_minute:
            self._limits.use(self._tenant).tokens -= tokens

    def end(self, now: float) -> None:
        """The call has ended."""
        self.release_body()
        use = self._limits.use(self._tenant)
        use.calls -= 1
        use.mean_call_s += NEW_CALLS * (now - self._since - use.mean_call_s)


class TenantLimits:
    """Counts what the tenants use at this router.

    Args:
        num_routers: Returns how many routers share the limits.
    """

    def __init__(self, num_routers: Callable[[], int]) -> None:
        self._num_routers = num_routers
        self._uses: dict[str, _Use] = {}

    def admit(self, tenant: Tenant, now: float) -> Admission:
        """Admits an API call.

        Raises:
            ApiError: The tenant has too many calls in flight, or has used up its tokens (429).
        """
        use, limits = self._at(tenant, now), tenant.limits
        if limits.requests and use.calls >= self._calls(tenant):
            message = f"{use.calls} of your requests are in progress already; try again later."
            raise too_many(message, use.mean_call_s / use.calls, kind="requests")
        if limits.tokens_per_minute and use.tokens <= 0:
            message = f"Your {limits.tokens_per_minute} tokens a minute are used up; try again later."
            raise too_many(message, (1 - use.tokens) / self._tokens_per_s(tenant))
        use.calls += 1
        return Admission(self, tenant, now)

    def headers(self, tenant: Tenant, now: float) -> Headers:
        """The headers that tell a client what is left, as OpenAI's."""
        limits, headers = tenant.limits, Headers()
        if not (limits.requests or limits.tokens_per_minute):
            return headers
        use = self._at(tenant, now)
        if limits.requests:
            calls = self._calls(tenant)
            reset_s = use.mean_call_s if use.calls else 0.0
            headers += _headers(b"requests", calls, calls - use.calls, reset_s)
        if limits.tokens_per_minute:
            per_s = self._tokens_per_s(tenant)
            capacity = per_s * MINUTE_S
            headers += _headers(b"tokens", int(capacity), int(use.tokens), (capacity - use.tokens) / per_s)
        return headers

    def use(self, tenant: Tenant) -> _Use:
        """What an admitted tenant uses."""
        return self._uses[tenant.name]

    def _at(self, tenant: Tenant, now: float) -> _Use:
        """What a tenant uses, with the tokens that it has got since."""
        use = self._uses.get(tenant.name)
        if use is None:
            use = self._uses[tenant.name] = _Use(self._tokens_per_s(tenant) * MINUTE_S, now)
        if tenant.limits.tokens_per_minute:
            per_s = self._tokens_per_s(tenant)
            use.tokens = min(per_s * MINUTE_S, use.tokens + per_s * (now - use.at))
            use.at = now
        return use

    def _calls(self, tenant: Tenant) -> int:
        return math.ceil(tenant.limits.requests / max(1, self._num_routers()))

    def _tokens_per_s(self, tenant: Tenant) -> float:
        return tenant.limits.tokens_per_minute / MINUTE_S / max(1, self._num_routers())


def _headers(name: bytes, limit: int, remaining: int, reset_s: float) -> Headers:
    reset = f"{reset_s:.3f}s".encode()
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % max(0, remaining)),
        (b"x-ratelimit-reset-" + name, reset),
    ]

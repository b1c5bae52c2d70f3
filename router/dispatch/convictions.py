"""The requests that crashed workers, so that a client's retry does not crash two more."""

from router.lru import LRU

REMEMBERED_S = 600.0
"""Time for which a request that crashed workers is refused, in seconds."""

MAX_REMEMBERED = 1_000
"""Number of requests that are remembered; the least recently used one goes first."""


class Convictions:
    """Remembers requests by their digests. Times are the event loop's."""

    def __init__(self) -> None:
        self._until: LRU[bytes, float] = LRU(MAX_REMEMBERED)

    def __bool__(self) -> bool:
        return bool(self._until.size)

    def add(self, digest: bytes, now: float) -> None:
        """Remembers a request for REMEMBERED_S."""
        self._until.put(digest, now + REMEMBERED_S, 1)

    def includes(self, digest: bytes, now: float) -> bool:
        """Returns whether a request is remembered."""
        until = self._until.get(digest)
        return until is not None and now < until

"""Two policies without predictions, for comparison and as examples.

With both, prompts with more uncached tokens than --long-prefill-tokens go to the prefill worker with the shortest
queue.

Both prefer workers that serve. While none does, all requests go to the one that will serve first, so that only one
wakes.
"""

from collections.abc import Sequence
from operator import attrgetter

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.policy_settings import PolicySettings
from router.placement.candidate import Candidate
from router.placement.costs import placement_of
from router.placement.policy import Placement, Situation

LONG_TOKENS = 2048
"""What `--long-prefill-tokens auto` means to these policies."""


class MostCachedPolicy:
    """Takes the combined worker with most of the prompt cached; among equals, the one with the fewest requests."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def place(self, seen: Situation) -> Placement:
        """Chooses the workers for a prompt."""
        workers = _serving_first(seen.combined, seen.now)
        decode = max(workers, key=lambda one: (seen.cached_blocks(one), -one.requests, seen.rng.random()))
        return placement_of(seen, self._settings, decode, _prefill_worker(seen, decode))


class RoundRobinPolicy:
    """Takes the combined workers in turn."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._last = ""

    def place(self, seen: Situation) -> Placement:
        """Chooses the workers for a prompt."""
        decode = _next(_serving_first(seen.combined, seen.now), self._last)
        self._last = decode.worker_id
        return placement_of(seen, self._settings, decode, _prefill_worker(seen, decode))


def _serving_first(workers: Sequence[Candidate], now: float) -> Sequence[Candidate]:
    """The workers that serve; if none does, the one that will first."""
    serving = [one for one in workers if one.serving]
    return serving or sorted(workers, key=lambda one: (one.wake_ms(now), -one.requests, one.worker_id))[:1]


def _next(workers: Sequence[Candidate], last: str) -> Candidate:
    """The worker whose name comes after `last`, or the first one."""
    later = [one for one in workers if one.worker_id > last]
    return min(later or workers, key=attrgetter("worker_id"))


def _prefill_worker(seen: Situation, decode: Candidate) -> Candidate | None:
    """The prefill worker with the shortest queue if the prompt is long, and there is one."""
    longest = seen.targets.long_prefill_tokens
    uncached = seen.prompt.tokens - seen.cached_blocks(decode) * BLOCK_SIZE
    if uncached <= (LONG_TOKENS if longest == "auto" else longest):
        return None
    workers = _serving_first(seen.prefill, seen.now)
    return min(workers, key=lambda one: (one.queue_ms(seen.now), seen.rng.random()), default=None)

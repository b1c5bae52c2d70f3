"""The compared policies. All run on the same engine, with the same token budget rule and caches.

cpd                  router/placement/policy.py; combined workers with lanes, and prefill workers
cpd-no-lanes         the same, with prompts in the decodes' batches
cpd-no-remote        the same, with combined workers only
cpd-no-cache         the same, without knowing what is cached
cpd-no-interference  the same, without interference costs (the delay to running streams)
cpd-no-queue         the same, without knowing which prompts wait on a worker
aggregated           combined workers only, chunked prefill in the decodes' batches, SGLang's routing
cache-aware          the same, with Dynamo's routing
most-cached          the same, always to the longest cached prefix: an upper bound for cached tokens
static-pd            each worker only prefills or only decodes
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.colocation import Mode, PrefillEstimator
from router.placement.candidate import Candidate
from router.placement.costs import PolicySettings, Prompt
from router.placement.policy import Placement, place
from router.prefix_index.index import Prefixes

PolicyName = Literal[
    "cpd",
    "cpd-no-lanes",
    "cpd-no-remote",
    "cpd-no-cache",
    "cpd-no-interference",
    "cpd-no-queue",
    "aggregated",
    "cache-aware",
    "most-cached",
    "static-pd",
]


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of a policy, with at least one combined worker. See `router.placement.policy.place`."""

    prompt: Prompt
    combined: Sequence[Candidate]
    prefill: Sequence[Candidate]
    cached: Mapping[str, int]
    settings: PolicySettings
    now: float
    rng: Random

    def cached_blocks(self, worker: Candidate) -> int:
        """Returns how many leading blocks of the prompt the worker has cached."""
        return self.cached.get(worker.worker_id, 0)


Place = Callable[[Situation], Placement | None]
"""Returns where a request goes, or None if no worker can take it."""

# SGLang's router, policy cache_aware with the defaults of 0.5: the shortest queue if load is uneven, else the longest
# match if it is long enough, else the shortest queue.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to run a cluster.

    Attributes:
        place: Places requests.
        colocate: How combined workers compute prompts beside decodes.
        prefill_workers: Whether there are prefill workers.
    """

    place: Place
    colocate: Mode
    prefill_workers: bool


def _cpd(seen: Situation) -> Placement | None:
    cached = Prefixes(seen.cached)
    return place(seen.prompt, seen.combined, seen.prefill, cached, seen.settings, now=seen.now, rng=seen.rng)


def _without_cache(seen: Situation) -> Placement | None:
    return _cpd(replace(seen, cached={}))


def _without_interference(seen: Situation) -> Placement | None:
    streams = [replace(one, requests=0, estimator=PrefillEstimator(one.estimator.colocation)) for one in seen.combined]
    return _cpd(replace(seen, combined=streams))


def _without_queue(seen: Situation) -> Placement | None:
    return _cpd(
        replace(
            seen,
            combined=[replace(one, idle_at=0.0) for one in seen.combined],
            prefill=[replace(one, idle_at=0.0) for one in seen.prefill],
        )
    )


def _aggregated(seen: Situation) -> Placement:
    loads = [one.requests for one in seen.combined]
    least, most = min(loads), max(loads)
    shortest = min(seen.combined, key=lambda one: (one.requests, seen.rng.random()))
    if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
        return _local(shortest)
    best = _best_match(seen)
    matched = seen.cached_blocks(best) * BLOCK_SIZE
    return _local(best if matched > CACHE_THRESHOLD * seen.prompt.tokens else shortest)


def _cache_aware(seen: Situation) -> Placement:
    """Dynamo's KV router (overlap weight 1): fewest blocks to prefill plus blocks in use."""

    def cost(one: Candidate) -> tuple[float, float]:
        prefill_blocks = seen.prompt.tokens / BLOCK_SIZE - seen.cached_blocks(one)
        return prefill_blocks + one.num_pages - one.free_pages - one.cached_pages, seen.rng.random()

    return _local(min(seen.combined, key=cost))


def _most_cached(seen: Situation) -> Placement:
    return _local(_best_match(seen))


def _static_pd(seen: Situation) -> Placement | None:
    """The prefill worker that finishes first, given its cache and queue, and the decode worker with fewest requests."""
    if not seen.prefill:
        return None
    decode = min(seen.combined, key=lambda one: (one.requests, seen.rng.random()))

    def done_ms(one: Candidate) -> tuple[float, float]:
        before = seen.cached_blocks(one) * BLOCK_SIZE
        return one.queue_ms(seen.now) + one.prefill(max(1, seen.prompt.tokens - before), before).ms, seen.rng.random()

    return Placement(decode, (min(seen.prefill, key=done_ms),), None, 0, False, ())


def _best_match(seen: Situation) -> Candidate:
    return max(seen.combined, key=lambda one: (seen.cached_blocks(one), -one.requests, seen.rng.random()))


def _local(decode: Candidate) -> Placement:
    return Placement(decode, (), None, 0, False, ())


POLICIES: dict[PolicyName, Policy] = {
    "cpd": Policy(_cpd, "auto", prefill_workers=True),
    "cpd-no-lanes": Policy(_cpd, "mixed", prefill_workers=True),
    "cpd-no-remote": Policy(_cpd, "auto", prefill_workers=False),
    "cpd-no-cache": Policy(_without_cache, "auto", prefill_workers=True),
    "cpd-no-interference": Policy(_without_interference, "auto", prefill_workers=True),
    "cpd-no-queue": Policy(_without_queue, "auto", prefill_workers=True),
    "aggregated": Policy(_aggregated, "mixed", prefill_workers=False),
    "cache-aware": Policy(_cache_aware, "mixed", prefill_workers=False),
    "most-cached": Policy(_most_cached, "mixed", prefill_workers=False),
    "static-pd": Policy(_static_pd, "mixed", prefill_workers=True),
}

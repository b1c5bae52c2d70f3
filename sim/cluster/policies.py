"""The policies that are compared. All run on the same engine, with the same token budget rule and the same caches.

cpd                  router/placement/policy.py; workers with lanes beside some prefill workers
cpd-no-lanes         the same, prompts in the decodes' batches
cpd-no-remote        the same, all workers combined
cpd-no-cache         the same, blind for what is cached
cpd-no-interference  the same, blind for interference: what a prompt or one more stream does to the streams there
cpd-no-queue         the same, blind for the prompts that a worker has still to compute
aggregated           all workers combined, chunked prefill in the decodes' batches, routing as in SGLang's router
cache-aware          the same, routing as in Dynamo's router
most-cached          the same, always to the longest cached prefix: how much caching there is to be had
static-pd            some workers only prefill, the others only decode, every prompt goes the same way
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
    """What a policy decides by: see `router.placement.policy.place`. There is a combined worker."""

    prompt: Prompt
    combined: Sequence[Candidate]
    prefill: Sequence[Candidate]
    cached: Mapping[str, int]
    settings: PolicySettings
    now: float
    rng: Random

    def cached_blocks(self, worker: Candidate) -> int:
        """Leading blocks of the prompt that the worker has."""
        return self.cached.get(worker.worker_id, 0)


Place = Callable[[Situation], Placement | None]
"""Where a request goes; None: nowhere yet."""

# SGLang's router, cache_aware (its defaults at 0.5): the shortest queue while load is uneven, else the longest match if
# it is long enough, else the shortest queue.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to run a cluster.

    Attributes:
        place: Where a request goes.
        colocate: Where prompts go on combined workers.
        prefill_workers: Whether some of the workers are prefill workers.
    """

    place: Place
    colocate: Mode
    prefill_workers: bool


def policy(name: PolicyName) -> Policy:
    """The policy of this name."""
    match name:
        case "cpd":
            return Policy(_ours, "auto", prefill_workers=True)
        case "cpd-no-lanes":
            return Policy(_ours, "mixed", prefill_workers=True)
        case "cpd-no-remote":
            return Policy(_ours, "auto", prefill_workers=False)
        case "cpd-no-cache":
            return Policy(_blind, "auto", prefill_workers=True)
        case "cpd-no-interference":
            return Policy(_without_interference, "auto", prefill_workers=True)
        case "cpd-no-queue":
            return Policy(_hasty, "auto", prefill_workers=True)
        case "aggregated":
            return Policy(_aggregated, "mixed", prefill_workers=False)
        case "cache-aware":
            return Policy(_least_blocks, "mixed", prefill_workers=False)
        case "most-cached":
            return Policy(_most_cached, "mixed", prefill_workers=False)
        case "static-pd":
            return Policy(_static_pd, "mixed", prefill_workers=True)


def _ours(seen: Situation) -> Placement | None:
    cached = Prefixes(seen.cached)
    return place(seen.prompt, seen.combined, seen.prefill, cached, seen.settings, now=seen.now, rng=seen.rng)


def _blind(seen: Situation) -> Placement | None:
    return _ours(replace(seen, cached={}))


def _without_interference(seen: Situation) -> Placement | None:
    streams = [replace(one, requests=0, beside=PrefillEstimator(one.beside.rule)) for one in seen.combined]
    return _ours(replace(seen, combined=streams))


def _hasty(seen: Situation) -> Placement | None:
    return _ours(
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


def _least_blocks(seen: Situation) -> Placement:
    """Dynamo's KV router (overlap weight 1): least of blocks to prefill plus blocks in use."""

    def cost(one: Candidate) -> tuple[float, float]:
        prefill_blocks = seen.prompt.tokens / BLOCK_SIZE - seen.cached_blocks(one)
        return prefill_blocks + one.num_pages - one.free_pages - one.cached_pages, seen.rng.random()

    return _local(min(seen.combined, key=cost))


def _most_cached(seen: Situation) -> Placement:
    return _local(_best_match(seen))


def _static_pd(seen: Situation) -> Placement | None:
    """The prefill worker that will be done soonest, for its cache and its queue; the least busy decode worker."""
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

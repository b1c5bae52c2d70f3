"""The policies that are compared. All run on the same engine, with the same token budget rule and the same caches.

cpd                 router/policy.py; workers with lanes beside some prefill workers
cpd-no-lanes        the same, prompts in the decodes' batches
cpd-no-remote       the same, all workers combined
cpd-no-cache        the same, blind for what is cached
aggregated          all workers combined, chunked prefill in the decodes' batches, routing as in SGLang's router
cache-aware         the same, routing as in Dynamo's router
most-cached         the same, always to the longest cached prefix: how much caching there is to be had
static-pd           some workers only prefill, the others only decode, every prompt goes the same way
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from cpd.blocks import BLOCK_SIZE
from engine.colocation import Mode
from router.candidate import Candidate
from router.policy import Placement, PolicySettings, Prompt, place

PolicyName = Literal[
    "cpd", "cpd-no-lanes", "cpd-no-remote", "cpd-no-cache", "aggregated", "cache-aware", "most-cached", "static-pd"
]

Place = Callable[
    [Prompt, Sequence[Candidate], Sequence[Candidate], Mapping[str, int], PolicySettings, float, Random],
    Placement | None,
]
"""As `router.policy.place`, with `now` before `rng` at the end."""

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
        case "aggregated":
            return Policy(_aggregated, "mixed", prefill_workers=False)
        case "cache-aware":
            return Policy(_least_blocks, "mixed", prefill_workers=False)
        case "most-cached":
            return Policy(_most_cached, "mixed", prefill_workers=False)
        case "static-pd":
            return Policy(_static_pd, "mixed", prefill_workers=True)


def _ours(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    return place(prompt, combined, prefill, cached, settings, now=now, rng=rng)


def _blind(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    return place(prompt, combined, prefill, {}, settings, now=now, rng=rng)


def _aggregated(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    if not combined:
        return None
    return _local(_sglang(prompt, combined, cached, rng))


def _least_blocks(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    """Dynamo's KV router (overlap weight 1): least of blocks to prefill plus blocks in use."""
    if not combined:
        return None

    def cost(one: Candidate) -> tuple[float, float]:
        prefill_blocks = prompt.tokens / BLOCK_SIZE - cached.get(one.worker_id, 0)
        return prefill_blocks + one.num_pages - one.free_pages - one.cached_pages, rng.random()

    return _local(min(combined, key=cost))


def _most_cached(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    if not combined:
        return None
    return _local(max(combined, key=lambda one: (cached.get(one.worker_id, 0), -one.requests, rng.random())))


def _static_pd(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    now: float,
    rng: Random,
) -> Placement | None:
    """The prefill worker that will be done soonest, for its cache and its queue; the least busy decode worker."""
    if not (combined and prefill):
        return None
    decode = min(combined, key=lambda one: (one.requests, rng.random()))

    def done_ms(one: Candidate) -> tuple[float, float]:
        before = cached.get(one.worker_id, 0) * BLOCK_SIZE
        return one.queue_ms(now) + one.prefill(max(1, prompt.tokens - before), before).ms, rng.random()

    return Placement(decode, (min(prefill, key=done_ms),), 0, False, ())


def _sglang(prompt: Prompt, workers: Sequence[Candidate], cached: Mapping[str, int], rng: Random) -> Candidate:
    loads = [one.requests for one in workers]
    least, most = min(loads), max(loads)
    shortest = min(workers, key=lambda one: (one.requests, rng.random()))
    if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
        return shortest
    best = max(workers, key=lambda one: (cached.get(one.worker_id, 0), -one.requests, rng.random()))
    matched = cached.get(best.worker_id, 0) * BLOCK_SIZE
    return best if matched > CACHE_THRESHOLD * prompt.tokens else shortest


def _local(decode: Candidate) -> Placement:
    return Placement(decode, (), 0, False, ())

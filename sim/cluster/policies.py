"""The compared ways to run a cluster. All run on the same engine, with the same token budget rule and caches.

cost                  the router's policy of this name (router/placement/cost_policy.py); combined workers with lanes,
                      and prefill workers
most-cached, round-robin, module:object    the same cluster with another of the router's policies
cost-no-lanes         as cost, with prompts in the decodes' batches
cost-no-remote        as cost, with combined workers only
cost-no-fetch         as cost, without fetching prefixes from other workers
cost-no-cache         as cost, without knowing what is cached
cost-no-interference  as cost, without interference costs (the delay to running streams)
cost-no-queue         as cost, without knowing which prompts wait on a worker
sglang                combined workers only, chunked prefill in the decodes' batches, SGLang's routing
sglang-lanes          the same with lanes
dynamo                as sglang, with Dynamo's routing
static-pd             each worker only prefills or only decodes
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.policy_settings import PolicySettings
from cpd.performance.colocation import Mode, PrefillEstimator
from router.placement.candidate import Candidate
from router.placement.cost_policy import CostPolicy
from router.placement.costs import placement_of
from router.placement.policies import make_policy
from router.placement.policy import Placement, PlacementPolicy, Situation
from router.prefix_index.index import Prefixes

# SGLang's router, policy cache_aware with the defaults of 0.5: the shortest queue if load is uneven, else the longest
# match if it is long enough, else the shortest queue.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


@dataclass(frozen=True, slots=True)
class System:
    """A way to run a cluster.

    Attributes:
        policy: Makes the policy of the settings.
        colocate: How combined workers compute prompts beside decodes.
        prefill_workers: Whether there are prefill workers.
    """

    policy: Callable[[PolicySettings], PlacementPolicy]
    colocate: Mode = "auto"
    prefill_workers: bool = True


class _Ablation:
    """The policy `cost` with less knowledge."""

    def __init__(self, settings: PolicySettings, seen_as: Callable[[Situation], Situation]) -> None:
        self._policy = CostPolicy(settings)
        self._seen_as = seen_as

    def place(self, seen: Situation) -> Placement:
        """Chooses the workers for a prompt."""
        return self._policy.place(self._seen_as(seen))


class _Baseline:
    """A policy that chooses a combined worker, and perhaps a prefill worker."""

    def __init__(
        self, settings: PolicySettings, choose: Callable[[Situation], tuple[Candidate, Candidate | None]]
    ) -> None:
        self._settings = settings
        self._choose = choose

    def place(self, seen: Situation) -> Placement:
        """Chooses the workers for a prompt."""
        return placement_of(seen, self._settings, *self._choose(seen))


def _without_cache(seen: Situation) -> Situation:
    return replace(seen, cached=Prefixes())


def _without_interference(seen: Situation) -> Situation:
    streams = [replace(one, requests=0, estimator=PrefillEstimator(one.estimator.colocation)) for one in seen.combined]
    return replace(seen, combined=streams)


def _without_queue(seen: Situation) -> Situation:
    combined, prefill = ([replace(one, idle_at=0.0) for one in role] for role in (seen.combined, seen.prefill))
    return replace(seen, combined=combined, prefill=prefill)


def _sglang(seen: Situation) -> tuple[Candidate, None]:
    loads = [one.requests for one in seen.combined]
    least, most = min(loads), max(loads)
    shortest = min(seen.combined, key=lambda one: (one.requests, seen.rng.random()))
    if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
        return shortest, None
    best = max(seen.combined, key=lambda one: (seen.cached_blocks(one), -one.requests, seen.rng.random()))
    matched = seen.cached_blocks(best) * BLOCK_SIZE
    return best if matched > CACHE_THRESHOLD * seen.prompt.tokens else shortest, None


def _dynamo(seen: Situation) -> tuple[Candidate, None]:
    """Dynamo's KV router (overlap weight 1): fewest blocks to prefill, queued ones included, plus blocks in use."""

    def cost(one: Candidate) -> tuple[float, float]:
        queued_tokens = one.queue_ms(seen.now) / one.token_ms if one.token_ms else 0.0
        prefill_blocks = (queued_tokens + seen.prompt.tokens) / BLOCK_SIZE - seen.cached_blocks(one)
        return prefill_blocks + one.num_pages - one.free_pages - one.cached_pages, seen.rng.random()

    return min(seen.combined, key=cost), None


def _static_pd(seen: Situation) -> tuple[Candidate, Candidate | None]:
    """The decode worker with the fewest requests, and the prefill worker that finishes first by cache and queue."""
    decode = min(seen.combined, key=lambda one: (one.requests, seen.rng.random()))

    def done_ms(one: Candidate) -> tuple[float, float]:
        before = seen.cached_blocks(one) * BLOCK_SIZE
        return one.queue_ms(seen.now) + one.prefill(max(1, seen.prompt.tokens - before), before).ms, seen.rng.random()

    return decode, min(seen.prefill, key=done_ms, default=None)


SYSTEMS: dict[str, System] = {
    "cost-no-lanes": System(CostPolicy, colocate="mixed"),
    "cost-no-remote": System(CostPolicy, prefill_workers=False),
    "cost-no-fetch": System(lambda settings: CostPolicy(settings.model_copy(update={"prefix_fetches": False}))),
    "cost-no-cache": System(lambda settings: _Ablation(settings, _without_cache)),
    "cost-no-interference": System(lambda settings: _Ablation(settings, _without_interference)),
    "cost-no-queue": System(lambda settings: _Ablation(settings, _without_queue)),
    "sglang": System(lambda settings: _Baseline(settings, _sglang), "mixed", prefill_workers=False),
    "sglang-lanes": System(lambda settings: _Baseline(settings, _sglang), prefill_workers=False),
    "dynamo": System(lambda settings: _Baseline(settings, _dynamo), "mixed", prefill_workers=False),
    "static-pd": System(lambda settings: _Baseline(settings, _static_pd), "mixed"),
}


def make_system(settings: PolicySettings) -> System:
    """Returns the system that the settings name. A policy of the router runs on combined and prefill workers.

    Raises:
        ConfigError: There is no such system or policy.
    """
    if settings.name in SYSTEMS:
        return SYSTEMS[settings.name]
    make_policy(settings)  # raises here if there is none
    return System(make_policy)

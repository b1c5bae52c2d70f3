"""The policy `cost`: chooses the workers with the lowest predicted cost. It has no state.

The option with the lowest cost wins (`costs.py` has the formula). A session stays where its cache is as long as that
saves more than the other streams there cost. Otherwise its prefix spreads to more workers. A prompt goes to a prefill
worker if streams on its decode worker would lose more than it gains.

1. A cheap guess picks the most promising workers; only those are predicted in full.
2. Among options of nearly equal cost, the one with the fewest tokens to compute wins, and local before remote.
3. If several are left, two are drawn at random and the one whose worker has fewer requests wins. Several routers see
   the same loads and would otherwise all choose the same worker.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import nsmallest
from math import inf
from operator import add, attrgetter
from random import Random
from typing import NamedTuple

from cpd.common.policy_settings import PolicySettings
from router.placement.candidate import Candidate
from router.placement.costs import DecodePrediction, PlacementQuery, PrefillPrediction
from router.placement.policy import Option, Placement, Situation
from router.placement.simple_policies import MostCachedPolicy


class CostPolicy:
    """See the module."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._fallback = MostCachedPolicy(settings)

    def place(self, seen: Situation) -> Placement:
        """Chooses the option with the lowest cost. If predictions can't be trusted, it takes the most cached worker."""
        if not seen.trusted:
            return self._fallback.place(seen)
        query, rng = PlacementQuery(seen, self._settings), seen.rng
        blocks = seen.cached.cached
        warm = [one for one in seen.combined if one.worker_id in blocks] if blocks else []
        decodes = _most_promising(query, seen.combined, warm, rng)
        sources = [one for one in warm if one.serving]  # a pool that is to sleep may be gone before the fetch ends
        source = max(sources, key=lambda one: (query.cached(one).tokens, -one.requests), default=None)
        if source is not None and seen.prefill and not query.may_be_local(source):
            source = None
        if not self._settings.prefix_fetches:
            source = None

        ways: list[_Way] = []
        for decode in decodes:
            if not seen.prefill or query.may_be_local(decode.worker):
                ways.append(_Way(decode.local(), decode))
            if source is not None and decode.cached.tokens < query.cached(source).tokens:
                ways.append(_Way(decode.local(source), decode))
        near_ms = self._near_ms(ways, seen.targets.slo_ttft_ms) if ways else inf
        others: Callable[[], Iterable[Option]] = tuple
        remote = [decode for decode in decodes if query.may_be_remote(decode.worker)] if seen.prefill else []
        if remote:
            others = partial(self._remote_options, query, seen, remote)
            shared_ms = min([decode.shared_ms for decode in remote])
            overhead_ms = min([one.overhead_ms for one in seen.prefill])
            least_effort = min([seen.prompt.tokens - query.cached(one).tokens for one in seen.prefill]), True
            winning_ms = self._displacing_ms(ways, near_ms, least_effort)
            if shared_ms + min(overhead_ms, seen.targets.slo_ttft_ms) <= winning_ms:  # what any of them costs at least
                prefills = self._prefill_predictions(query, seen)
                if shared_ms + min([one.least_ms for one in prefills]) <= winning_ms:
                    others = tuple
                    ways += [_Way(decode.remote(one), decode, one) for decode in remote for one in prefills]
                    near_ms = self._near_ms(ways, seen.targets.slo_ttft_ms)

        ways.sort(key=_cost_ms)
        near = [way for way in ways if way.option.cost_ms <= near_ms]
        efforts = [_effort(way.option) for way in near]
        simplest = min(efforts)
        equals = [way for way, effort in zip(near, efforts, strict=True) if effort == simplest]
        chosen = min(rng.sample(equals, min(2, len(equals))), key=lambda way: way.decode.worker.requests)

        option, decode = chosen.option, chosen.decode
        most_cached = max([blocks[one.worker_id] for one in warm], default=0)
        return Placement(
            decode=decode.worker,
            prefill=_prefill_workers(ways, chosen),
            prefix_source=source if option.prefix_source else None,
            prefix_source_blocks=blocks[option.prefix_source] if option.prefix_source else 0,
            long_prefill_tokens=decode.break_even(option),
            replicates_prefix=blocks.get(decode.worker.worker_id, 0) < most_cached,
            predicted=(option, *[way.option for way in ways if way is not chosen]),
            others=others,
        )

    def _prefill_predictions(self, query: PlacementQuery, seen: Situation) -> list[PrefillPrediction]:
        guesses, count = map(query.guess_prefill_ms, seen.prefill), self._settings.prefill_predicted
        return [PrefillPrediction(query, one) for one in _lowest(seen.prefill, count, guesses, seen.rng)]

    def _remote_options(
        self, query: PlacementQuery, seen: Situation, decodes: Sequence[DecodePrediction]
    ) -> list[Option]:
        prefills = self._prefill_predictions(query, seen)
        return [decode.remote(prefill) for decode in decodes for prefill in prefills]

    def _displacing_ms(self, ways: Iterable["_Way"], near_ms: float, least_effort: tuple[int, bool]) -> float:
        """The highest cost with which an option of this effort could win over the local ones.

        Args:
            ways: Local options.
            near_ms: The highest cost that counts as equal to the lowest one of `ways`.
        """
        best = min(ways, key=_cost_ms, default=None)
        if best is None or _effort(best.option) >= least_effort:
            return near_ms
        return best.option.cost_ms - self._settings.near_ms

    def _near_ms(self, ways: Iterable["_Way"], slo_ttft_ms: float) -> float:
        """The highest cost that counts as equal to the lowest one."""
        best = min(ways, key=_cost_ms).option
        return best.cost_ms + max(self._settings.near_ms, self._settings.near * min(best.ttft_ms, slo_ttft_ms))


class _Way(NamedTuple):
    """An option with the predictions it was made from."""

    option: Option
    decode: DecodePrediction
    prefill: PrefillPrediction | None = None


_cost_ms = attrgetter("option.cost_ms")


def _effort(option: Option) -> tuple[int, bool]:
    """Orders options of nearly equal cost: tokens to compute, then whether it takes two workers."""
    return option.uncached_tokens, bool(option.prefill or option.prefix_source)


def _most_promising(
    query: PlacementQuery, workers: Sequence[Candidate], warm: Sequence[Candidate], rng: Random
) -> list[DecodePrediction]:
    """The combined workers to predict in full; `warm` ones have some of the prompt cached."""
    count = query.settings.combined_predicted
    if len(workers) <= count:
        return [DecodePrediction(query, worker) for worker in workers]
    decode_ms = [query.guess_decode_ms(one) for one in workers]
    local = _lowest(workers, count, map(add, decode_ms, map(query.guess_local_ms, workers)), rng)
    remote = _lowest(workers, count, decode_ms, rng)
    # guesses ignore that short prompts need not queue
    most = _lowest(warm, query.settings.warm_predicted, [-query.cached(one).tokens for one in warm], rng)
    shortlist = {one.worker_id: one for one in (*local, *remote, *most)}
    return [DecodePrediction(query, worker) for worker in shortlist.values()]


def _lowest(workers: Sequence[Candidate], count: int, guesses: Iterable[float], rng: Random) -> list[Candidate]:
    """The `count` workers with the lowest guesses, which are in the order of `workers`."""
    if len(workers) <= count:
        return list(workers)
    ranked = nsmallest(count, ((guess, rng.random(), index) for index, guess in enumerate(guesses)))
    return [workers[index] for _, _, index in ranked]


def _prefill_workers(ways: Sequence[_Way], chosen: _Way) -> tuple[Candidate, ...]:
    """The chosen prefill worker, then the decode worker's other ones by cost; none if the chosen way is local."""
    if chosen.prefill is None:
        return ()
    others = [way.prefill for way in ways if way.decode is chosen.decode and way.prefill not in (None, chosen.prefill)]
    return (chosen.prefill.worker, *(other.worker for other in others if other is not None))

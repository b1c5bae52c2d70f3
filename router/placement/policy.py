"""Chooses the workers for a request: a pure function of what is known about the workers.

The option with the lowest cost wins (`costs.py` has the formula). A session stays where its cache is as long as that
saves more than the other streams there cost. Otherwise its prefix spreads to more workers. A prompt goes to a prefill
worker if streams on its decode worker would lose more than it gains.

1. A cheap guess picks the most promising workers; only those are predicted in full.
2. Among options of nearly equal cost, the one with the fewest tokens to compute wins, and local before remote.
3. If several are left, two are drawn at random and the one whose worker has fewer requests wins. Several routers see
   the same loads and would otherwise all choose the same worker.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from math import inf
from operator import add
from random import Random
from typing import NamedTuple

from router.placement.candidate import Candidate
from router.placement.costs import DecodePrediction, Option, PlacementQuery, PolicySettings, PrefillPrediction, Prompt
from router.prefix_index.index import Prefixes

COMBINED_PREDICTED = 4
"""Number of combined workers predicted in full for a local prefill, and again for a remote one."""

WARM_PREDICTED = 2
"""Number of workers with most of the prompt cached that are added: guesses ignore that short prompts need not queue."""

PREFILL_PREDICTED = 4
"""Number of prefill workers predicted in full; a request tries no others."""

NEAR_MS, NEAR = 1.0, 0.02
"""Options are equally good if their costs differ by less than NEAR_MS, or by less than this part of the TTFT."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty if `decode` computes the prompt.
        prefix_source: The worker from which `decode` fetches the first blocks.
        long_prefill_tokens: `decode` computes up to this many uncached tokens without remote prefill or fetch.
        replicates_prefix: Another combined worker has more of the prompt cached; `decode` gets a further copy.
        predicted: The options predicted in full, the chosen one first.
        prefix_source_blocks: The number of blocks to fetch.
        others: Predicts the remaining options, which can't be as good, for display.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]
    prefix_source: Candidate | None
    long_prefill_tokens: int
    replicates_prefix: bool
    predicted: tuple[Option, ...]
    prefix_source_blocks: int = 0
    others: Callable[[], Iterable[Option]] = field(default=tuple, compare=False)

    @property
    def route(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill else "local"

    @property
    def prompt_worker(self) -> Candidate:
        """The worker that computes the prompt."""
        return self.prefill[0] if self.prefill else self.decode

    @property
    def chosen(self) -> Option:
        """The chosen option."""
        return self.predicted[0]

    @property
    def options(self) -> tuple[Option, ...]:
        """All options, the chosen one first."""
        return (*self.predicted, *self.others())


def place(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Prefixes,
    settings: PolicySettings,
    *,
    now: float,
    rng: Random,
) -> Placement | None:
    """Chooses the option with the lowest cost.

    Args:
        combined, prefill: Live workers of either role.
        cached: Leading blocks of the prompt that each worker has cached.
        now: Time in seconds, of the clock of `Candidate.idle_at`.
        rng: Decides between options of nearly equal cost.

    Returns:
        The placement; None if no combined worker is live.
    """
    if not combined:
        return None
    query = PlacementQuery(prompt, combined, cached, settings, now)
    blocks = cached.cached
    warm = [one for one in combined if one.worker_id in blocks] if blocks else []
    decodes = _most_promising(query, combined, warm, rng)
    guesses = map(query.guess_prefill_ms, prefill)
    prefills = [PrefillPrediction(query, one) for one in _lowest(prefill, PREFILL_PREDICTED, guesses, rng)]
    source = max(warm, key=lambda one: (query.cached(one).tokens, -one.requests), default=None)
    if source is not None and prefills and not query.may_be_local(source):
        source = None

    ways: list[_Way] = []
    for decode in decodes:
        if not prefills or query.may_be_local(decode.worker):
            ways.append(_Way(decode.local(), decode))
        if source is not None and decode.cached.tokens < query.cached(source).tokens:
            ways.append(_Way(decode.local(source), decode))
    near_ms = _near_ms(ways) if ways else inf
    others: Callable[[], Iterable[Option]] = tuple
    remote = [decode for decode in decodes if query.may_be_remote(decode.worker)] if prefills else []
    if remote:
        least_ms = min([decode.shared_ms for decode in remote]) + min([one.least_ms for one in prefills])
        if least_ms > near_ms:  # no remote option can be as good
            others = partial(_remote_options, remote, prefills)
        else:
            ways += [_Way(decode.remote(one), decode, one) for decode in remote for one in prefills]
            near_ms = _near_ms(ways)

    ways.sort(key=_cost_ms)
    near = [way for way in ways if way.option.cost_ms <= near_ms]
    simplest = min(_effort(way.option) for way in near)
    equals = [way for way in near if _effort(way.option) == simplest]
    chosen = min(rng.sample(equals, min(2, len(equals))), key=lambda way: way.decode.worker.requests)

    option, decode = chosen.option, chosen.decode
    most_cached = max((blocks[one.worker_id] for one in warm), default=0)
    return Placement(
        decode=decode.worker,
        prefill=_prefill_workers(ways, chosen),
        prefix_source=source if option.prefix_source else None,
        prefix_source_blocks=blocks[option.prefix_source] if option.prefix_source else 0,
        long_prefill_tokens=decode.break_even(option),
        replicates_prefix=blocks.get(decode.worker.worker_id, 0) < most_cached,
        predicted=(option, *(way.option for way in ways if way is not chosen)),
        others=others,
    )


class _Way(NamedTuple):
    """An option with the predictions it was made from."""

    option: Option
    decode: DecodePrediction
    prefill: PrefillPrediction | None = None


def _cost_ms(way: _Way) -> float:
    return way.option.cost_ms


def _near_ms(ways: Iterable[_Way]) -> float:
    """The highest cost that counts as equal to the lowest one."""
    best = min(ways, key=_cost_ms).option
    return best.cost_ms + max(NEAR_MS, NEAR * best.ttft_ms)


def _remote_options(decodes: Sequence[DecodePrediction], prefills: Sequence[PrefillPrediction]) -> list[Option]:
    return [decode.remote(prefill) for decode in decodes for prefill in prefills]


def _effort(option: Option) -> tuple[int, bool]:
    """Orders options of nearly equal cost: tokens to compute, then whether it takes two workers."""
    return option.uncached_tokens, bool(option.prefill or option.prefix_source)


def _most_promising(
    query: PlacementQuery, workers: Sequence[Candidate], warm: Sequence[Candidate], rng: Random
) -> list[DecodePrediction]:
    """The combined workers to predict in full; `warm` ones have some of the prompt cached."""
    if len(workers) <= COMBINED_PREDICTED:
        return [DecodePrediction(query, worker) for worker in workers]
    decode_ms = [query.guess_decode_ms(one) for one in workers]
    local = _lowest(workers, COMBINED_PREDICTED, map(add, decode_ms, map(query.guess_local_ms, workers)), rng)
    remote = _lowest(workers, COMBINED_PREDICTED, decode_ms, rng)
    most = _lowest(warm, WARM_PREDICTED, [-query.cached(one).tokens for one in warm], rng)
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

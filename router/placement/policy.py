"""Chooses the workers for a request: a pure function of what is known about the workers.

The option with the lowest cost wins (`costs.py` has the formula). So sessions stay where their cache is as long as that
saves more than the other streams there cost, hot prefixes spread to more workers when it does not, and a prompt goes to
a prefill worker when streams on its decode worker would lose more than it gains.

Only the most promising workers, by a cheap guess, are predicted in full. Among options of nearly equal cost the fewest
tokens to compute win, and local before remote. Of two of those, drawn at random, the worker with fewer requests wins:
several routers see the same loads and would otherwise all choose the same worker.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from math import inf
from operator import add
from random import Random

from router.placement.candidate import Candidate
from router.placement.costs import DecodeSide, Option, PlacementQuery, PolicySettings, PrefillSide, Prompt
from router.prefix_index.index import Prefixes

COMBINED_PREDICTED = 4
"""Combined workers predicted in full: this many for a local prefill, and this many for a remote one."""

WARM_PREDICTED = 2
"""Of the workers with most of the prompt cached, this many more: guesses ignore that short prompts need not queue."""

PREFILL_PREDICTED = 4
"""Prefill workers predicted in full; a request tries no others."""

NEAR_MS, NEAR = 1.0, 0.02
"""Options are equally good if their costs differ by less than the larger of this, and this part of the TTFT."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty if `decode` computes the prompt itself.
        prefix_source: The worker from which `decode` fetches the first blocks.
        long_prefill_tokens: `decode` computes up to this many uncached tokens itself, without remote prefill or fetch.
        replicated: Another combined worker has more of the prompt cached.
        predicted: The options predicted in full, the chosen one first.
        others: Predicts the other options, which can't be as good, to show them.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]
    prefix_source: Candidate | None
    long_prefill_tokens: int
    replicated: bool
    predicted: tuple[Option, ...]
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
    decoders = _most_promising(query, combined, warm, rng)
    guesses = map(query.guess_prefill_ms, prefill)
    helpers = [PrefillSide(query, one) for one in _lowest(prefill, PREFILL_PREDICTED, guesses, rng)]
    source = max(warm, key=lambda one: (query.cached(one).tokens, -one.requests), default=None)
    if source is not None and helpers and not query.may_be_local(source):
        source = None
    options: list[tuple[Option, DecodeSide, PrefillSide | None]] = []
    for decoder in decoders:
        if not helpers or query.may_be_local(decoder.worker):
            options.append((decoder.local(), decoder, None))
        if source is not None and decoder.cached.tokens < query.cached(source).tokens:
            options.append((decoder.local(source), decoder, None))
    leaving = [decoder for decoder in decoders if query.may_be_remote(decoder.worker)] if helpers else []
    others: Callable[[], Iterable[Option]] = tuple
    near_ms = _near_ms(options) if options else inf
    if leaving:
        least_ms = min([decoder.shared_ms for decoder in leaving]) + min([helper.least_ms for helper in helpers])
        if least_ms > near_ms:
            others = partial(_remote, leaving, helpers)
        else:
            options += [(decoder.remote(helper), decoder, helper) for decoder in leaving for helper in helpers]
            near_ms = _near_ms(options)
    options.sort(key=lambda option: option[0].cost_ms)
    near = [option for option in options if option[0].cost_ms <= near_ms]
    simplest = min(_effort(option[0]) for option in near)
    equals = [option for option in near if _effort(option[0]) == simplest]
    chosen = min(rng.sample(equals, min(2, len(equals))), key=lambda option: option[1].worker.requests)
    option, decoder, helper = chosen
    most_cached = max((blocks[one.worker_id] for one in warm), default=0)
    return Placement(
        decode=decoder.worker,
        prefill=() if helper is None else tuple(_in_order(options, decoder, helper)),
        prefix_source=source if option.prefix_source else None,
        long_prefill_tokens=decoder.break_even(option),
        replicated=blocks.get(decoder.worker.worker_id, 0) < most_cached,
        predicted=(option, *(other[0] for other in options if other is not chosen)),
        others=others,
    )


def _near_ms(options: "Iterable[tuple[Option, DecodeSide, PrefillSide | None]]") -> float:
    """The cost up to which options are as good as the best one."""
    best = min(options, key=lambda option: option[0].cost_ms)[0]
    return best.cost_ms + max(NEAR_MS, NEAR * best.ttft_ms)


def _remote(decoders: "Sequence[DecodeSide]", helpers: "Sequence[PrefillSide]") -> list[Option]:
    return [decoder.remote(helper) for decoder in decoders for helper in helpers]


def _effort(option: Option) -> tuple[int, bool]:
    """Orders options of nearly equal cost: tokens to compute, then whether it takes two workers."""
    return option.uncached_tokens, bool(option.prefill or option.prefix_source)


def _most_promising(
    query: PlacementQuery, workers: Sequence[Candidate], warm: Sequence[Candidate], rng: Random
) -> list[DecodeSide]:
    """The workers to predict in full; `warm` ones have some of the prompt cached."""
    if len(workers) <= COMBINED_PREDICTED:
        return [DecodeSide(query, worker) for worker in workers]
    decode_ms = [query.guess_decode_ms(one) for one in workers]
    local = _lowest(workers, COMBINED_PREDICTED, map(add, decode_ms, map(query.guess_local_ms, workers)), rng)
    remote = _lowest(workers, COMBINED_PREDICTED, decode_ms, rng)
    most = _lowest(warm, WARM_PREDICTED, [-query.cached(one).tokens for one in warm], rng)
    return [DecodeSide(query, worker) for worker in {one.worker_id: one for one in (*local, *remote, *most)}.values()]


def _lowest(workers: Sequence[Candidate], count: int, guesses: Iterable[float], rng: Random) -> list[Candidate]:
    """The `count` workers with the lowest guesses. `guesses` is in the order of `workers`."""
    if len(workers) <= count:
        return list(workers)
    ranked = nsmallest(count, ((guess, rng.random(), index) for index, guess in enumerate(guesses)))
    return [workers[index] for _, _, index in ranked]


def _in_order(
    options: Sequence[tuple[Option, DecodeSide, PrefillSide | None]], decoder: DecodeSide, first: PrefillSide
) -> list[Candidate]:
    """The prefill workers of a decode worker's options: the chosen one, then the others by cost."""
    others = [helper for _, other, helper in options if other is decoder and helper not in (None, first)]
    return [first.worker, *(helper.worker for helper in others if helper is not None)]

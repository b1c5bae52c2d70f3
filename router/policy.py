"""Where a request goes: a pure function of what is known about the workers.

Of all ways to serve it, the one of the least cost is taken (`router/costs.py`). So sessions stay where their cache is
while that saves more than the crowd there costs, hot prefixes are copied to other workers when it does not, and a
prompt leaves its decode worker when streams there would suffer more than it gains.

A cheap guess finds the few workers whose options are predicted in full. Among near-equals the one with least to
compute is taken, a local one first, and of two of those at random the one with fewer requests: several routers see the
same loads, and would all choose the one with the fewest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from math import inf
from operator import add
from random import Random

from router.candidate import Candidate
from router.costs import Decode, Option, PolicySettings, Prefill, Prompt, Request
from router.index import Prefixes

COMBINED_PREDICTED = 4
"""Combined workers predicted in full: so many of those that look best for a local prompt, and for a remote one."""

WARM_PREDICTED = 2
"""And so many of those with most of the prompt cached: a guess takes no account of prompts that need not queue."""

PREFILL_PREDICTED = 4
"""Prefill workers likewise; also as many as a request may try."""

NEAR_MS, NEAR = 1.0, 0.02
"""Options whose costs differ by less than this, and than this part of the TTFT, are equally good."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty where `decode` computes the prompt itself.
        cached_at: From whose cache `decode` is to have the first blocks.
        long_prefill_tokens: What `decode` may compute itself of a prompt with prefill workers, and without asking for
            what another cache has.
        replicated: Another combined worker has more of the prompt cached.
        predicted: Options that were predicted in full, the chosen one first.
        others: Predicts the rest: those that can't be as good, for whoever wants to see them.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]
    cached_at: Candidate | None
    long_prefill_tokens: int
    replicated: bool
    predicted: tuple[Option, ...]
    others: Callable[[], Iterable[Option]] = field(default=tuple, compare=False)

    @property
    def route(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill else "local"

    @property
    def computes(self) -> Candidate:
        """Who is to compute the prompt."""
        return self.prefill[0] if self.prefill else self.decode

    @property
    def chosen(self) -> Option:
        """What was predicted of the decision."""
        return self.predicted[0]

    @property
    def options(self) -> tuple[Option, ...]:
        """All of them, the chosen one first."""
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
    """The option of the least cost.

    Args:
        combined, prefill: Live workers of either role.
        cached: Leading blocks of the prompt that the workers have.
        now: In seconds, of the clock of `Candidate.idle_at`.
        rng: Decides among near-equals.

    Returns:
        None where no combined worker is live.
    """
    if not combined:
        return None
    request = Request(prompt, combined, cached, settings, now)
    blocks = cached.cached
    warm = [one for one in combined if one.worker_id in blocks] if blocks else []
    decoders = _most_promising(request, combined, warm, rng)
    guesses = map(request.guess_prefill_ms, prefill)
    helpers = [Prefill(request, one) for one in _few(prefill, PREFILL_PREDICTED, guesses, rng)]
    source = max(warm, key=lambda one: (request.held(one).tokens, -one.requests), default=None)
    if source is not None and helpers and not request.may_be_local(source):
        source = None
    options: list[tuple[Option, Decode, Prefill | None]] = []
    for decoder in decoders:
        if not helpers or request.may_be_local(decoder.worker):
            options.append((decoder.local(), decoder, None))
        if source is not None and decoder.held.tokens < request.held(source).tokens:
            options.append((decoder.local(source), decoder, None))
    leaving = [decoder for decoder in decoders if request.may_be_remote(decoder.worker)] if helpers else []
    others: Callable[[], Iterable[Option]] = tuple
    near_ms = _near_ms(options) if options else inf
    if leaving:
        least_ms = min([decoder.decode_ms for decoder in leaving]) + min([helper.least_ms for helper in helpers])
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
        cached_at=source if option.cached_at else None,
        long_prefill_tokens=decoder.break_even(option),
        replicated=blocks.get(decoder.worker.worker_id, 0) < most_cached,
        predicted=(option, *(other[0] for other in options if other is not chosen)),
        others=others,
    )


def _near_ms(options: "Iterable[tuple[Option, Decode, Prefill | None]]") -> float:
    """Options of no more cost are as good as the best one."""
    best = min(options, key=lambda option: option[0].cost_ms)[0]
    return best.cost_ms + max(NEAR_MS, NEAR * best.ttft_ms)


def _remote(decoders: "Sequence[Decode]", helpers: "Sequence[Prefill]") -> list[Option]:
    return [decoder.remote(helper) for decoder in decoders for helper in helpers]


def _effort(option: Option) -> tuple[int, bool]:
    """Decides among near-equals: what is to be computed, and whether it takes two workers."""
    return option.uncached_tokens, bool(option.prefill or option.cached_at)


def _most_promising(
    request: Request, workers: Sequence[Candidate], warm: Sequence[Candidate], rng: Random
) -> list[Decode]:
    """Those whose options are worth predicting; `warm` ones have some of the prompt cached."""
    if len(workers) <= COMBINED_PREDICTED:
        return [Decode(request, worker) for worker in workers]
    decode_ms = [request.guess_decode_ms(one) for one in workers]
    local = _few(workers, COMBINED_PREDICTED, map(add, decode_ms, map(request.guess_prompt_ms, workers)), rng)
    remote = _few(workers, COMBINED_PREDICTED, decode_ms, rng)
    most = _few(warm, WARM_PREDICTED, [-request.held(one).tokens for one in warm], rng)
    return [Decode(request, worker) for worker in {one.worker_id: one for one in (*local, *remote, *most)}.values()]


def _few(workers: Sequence[Candidate], count: int, guesses: Iterable[float], rng: Random) -> list[Candidate]:
    """The workers with the least guesses, which are in the order of the workers."""
    if len(workers) <= count:
        return list(workers)
    ranked = nsmallest(count, ((guess, rng.random(), index) for index, guess in enumerate(guesses)))
    return [workers[index] for _, _, index in ranked]


def _in_order(
    options: Sequence[tuple[Option, Decode, Prefill | None]], decoder: Decode, first: Prefill
) -> list[Candidate]:
    """The prefill workers of a decode worker's options: the chosen one, then the others as they cost."""
    others = [helper for _, other, helper in options if other is decoder and helper not in (None, first)]
    return [first.worker, *(helper.worker for helper in others if helper is not None)]

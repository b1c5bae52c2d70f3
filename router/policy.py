"""Where a request goes: a pure function of what is known about the workers.

Every option (a combined worker that computes the prompt itself, one that has its first blocks from another one's cache
before, or one with a prefill worker that computes it) has a cost in ms, and the least one is taken. It is what the
request makes people wait, this user and all others, summed up:

    own wait      queue, until there is a seat among the sequences that run, what comes back from host memory, prefill,
                  and what the pages' way adds to the first gap; then a decode step a token,
                  as long as prompts beside the streams lately made it
    stutter       of each stream beside a prefill, what its tokens are late when that is over
    crowding      of each stream there, what one more stream adds to every step
    those behind  of who comes next, the prefill's time, and that of pages from another cache
    misses        a broken promise (`--slo-ttft`, `--slo-itl`), own or others', counts far more than delays do
    memory        pages that come to a worker displace what may be wanted again, and is computed then beside the streams
                  there, or comes back from host memory; without room the request waits

So sessions stay where their cache is while that saves more than the crowd there costs, hot prefixes are copied to other
workers when it does not, and a prompt leaves its decode worker when streams there would suffer more than it gains.

A cheap guess finds the few workers whose options are predicted in full. Among near-equals the one with least to
compute is taken, a local one first, and of two of those at random the one with fewer requests: several routers see the
same loads, and would all choose the one with the fewest.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from math import inf
from random import Random
from typing import Literal, NamedTuple

from cpd.blocks import BLOCK_SIZE, blocks_for
from router.candidate import Candidate
from router.index import Prefixes

COMBINED_PREDICTED = 4
"""Combined workers predicted in full: so many of those that look best for a local prompt, and for a remote one."""

WARM_PREDICTED = 2
"""And so many of those with most of the prompt cached: a guess takes no account of prompts that need not queue."""

PREFILL_PREDICTED = 4
"""Prefill workers likewise; also as many as a request may try."""

REMOTE_MS = 2.0
"""What the calls between two workers add to the TTFT."""

EXPECTED_OUTPUT = 256
"""Tokens that an output is expected to have, unless it may have only fewer."""

COMPANY = 64
"""For so many tokens the streams of now are taken to stay."""

BEHIND = 2.0
"""How many others wait for a prefill that starts now, on average."""

DISPLACED = 0.25
"""How often what a page displaces, sooner or later, will be wanted again."""

BROKEN = 50.0
"""What a broken promise counts, own or of a stream there, in TTFTs at their limit: far more than any delay."""

SAFE = 0.8
"""A promise is safe up to this part of its limit, as predicted, and counts as broken at the limit. In between it counts
in part: predictions are a little off, and more streams come."""

NEAR_MS, NEAR = 1.0, 0.02
"""Options whose costs differ by less than this, and than this part of the TTFT, are equally good."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed.

    Attributes:
        tokens: To compute: the prompt, with output that was already emitted after a replay.
        output_tokens: Of each choice at most.
        choices: Sequences that will decode.
    """

    tokens: int
    output_tokens: int = 1
    choices: int = 1


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the operator wants.

    Attributes:
        slo_ttft_ms: A first token is to come within this time.
        slo_itl_ms: So long at most between two tokens of a stream; 0: there is no such promise.
        long_prefill_tokens: More uncached tokens go to a prefill worker; auto: where it is predicted to be better.
    """

    slo_ttft_ms: float = 2000.0
    slo_itl_ms: float = 50.0
    long_prefill_tokens: int | Literal["auto"] = "auto"


class Option(NamedTuple):  # made six times faster than a frozen dataclass
    """One way to serve a request, and what is predicted of it.

    Attributes:
        decode: The combined worker.
        prefill: The prefill worker; empty: `decode` computes the prompt itself.
        cached_at: The combined worker whose cache gives `decode` the first blocks of it; empty: none.
        uncached_tokens: What is to be computed.
        host_tokens: What comes back from host memory before, at the worker that computes or, with `cached_at`, there.
        queue_ms: Until that begins; what comes from another cache or from host memory has come by then.
        prefill_ms: Until it is done, from then on.
        transfer_ms: What the pages' way adds to the gap after the first token.
        ttft_ms: Until the first token.
        itl_ms: Between the tokens after it.
        harm_ms: What other users' tokens are delayed by, summed over all of them, and what their broken promises count.
        cost_ms: What is compared.
    """

    decode: str
    prefill: str
    cached_at: str
    uncached_tokens: int
    host_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    itl_ms: float
    harm_ms: float
    cost_ms: float


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
    request = _Request(prompt, cached, settings, now)
    blocks = cached.cached
    warm = [one for one in combined if one.worker_id in blocks] if blocks else []
    decoders = _most_promising(request, combined, warm, rng)
    helpers = [
        _Prefill(request, one)
        for one in _few(prefill, PREFILL_PREDICTED, lambda one: request.guess_prefill_ms(one), rng)
    ]
    source = max(warm, key=lambda one: (request.held(one).tokens, -one.requests), default=None)
    if source is not None and helpers and not request.may_be_local(source):
        source = None
    options: list[tuple[Option, _Decode, _Prefill | None]] = []
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


def _computing_ms(worker: Candidate) -> float:
    """Roughly, what everybody together waits for each token of a prompt that a combined worker computes."""
    return (1 + BEHIND + worker.decodes) * worker.token_ms


def _near_ms(options: "Iterable[tuple[Option, _Decode, _Prefill | None]]") -> float:
    """Options of no more cost are as good as the best one."""
    best = min(options, key=lambda option: option[0].cost_ms)[0]
    return best.cost_ms + max(NEAR_MS, NEAR * best.ttft_ms)


def _remote(decoders: "Sequence[_Decode]", helpers: "Sequence[_Prefill]") -> list[Option]:
    return [decoder.remote(helper) for decoder in decoders for helper in helpers]


def _effort(option: Option) -> tuple[int, bool]:
    """Decides among near-equals: what is to be computed, and whether it takes two workers."""
    return option.uncached_tokens, bool(option.prefill or option.cached_at)


class _Held(NamedTuple):
    """What a worker has of a prompt.

    Attributes:
        tokens: It need not compute these: at least one is left.
        returning: Those of them that come back from its host memory.
        copy_ms: Until they are back.
        lacking: Pages that it does not have of the prompt yet.
    """

    tokens: int
    returning: int
    copy_ms: float
    lacking: int


class _Request:
    """A prompt to place, and what is known beside the workers."""

    def __init__(self, prompt: Prompt, cached: Prefixes, settings: PolicySettings, now: float) -> None:
        self.prompt = prompt
        self.settings = settings
        self.now = now
        self.output = min(prompt.output_tokens, EXPECTED_OUTPUT)
        self.together = min(prompt.output_tokens, COMPANY)
        self._cached = cached
        self._nothing = _Held(0, 0, 0.0, blocks_for(prompt.tokens))
        self._held: dict[str, _Held] = {}

    def held(self, worker: Candidate) -> _Held:
        """What the worker has of the prompt."""
        name = worker.worker_id
        if name not in self._cached.cached:
            return self._nothing
        if name not in self._held:
            self._held[name] = self._look(worker)
        return self._held[name]

    def may_be_local(self, worker: Candidate) -> bool:
        threshold = self.settings.long_prefill_tokens
        return threshold == "auto" or self.prompt.tokens - self.held(worker).tokens <= threshold

    def may_be_remote(self, worker: Candidate) -> bool:
        return self.settings.long_prefill_tokens == "auto" or not self.may_be_local(worker)

    def _look(self, worker: Candidate) -> _Held:
        name, tokens = worker.worker_id, self.prompt.tokens
        last, returning = self._tokens(self._cached.cached[name]), 0
        if name in self._cached.in_pages:
            first = self._tokens(self._cached.in_pages[name])
            # what is in host memory behind the first blocks comes back if that is quicker than computing it
            saved_ms = worker.prefill(tokens - first, first).ms - worker.prefill(tokens - last, last).ms
            if blocks_for(last - first) * worker.host_page_ms < saved_ms:
                returning = last - first
            else:
                last = first
        lacking = blocks_for(tokens) - (last - returning) // BLOCK_SIZE
        return _Held(last, returning, blocks_for(returning) * worker.host_page_ms, lacking)

    def _tokens(self, blocks: int) -> int:
        return min(blocks * BLOCK_SIZE, self.prompt.tokens - 1)

    def guess_prefill_ms(self, worker: Candidate) -> float:
        """Roughly, until the worker has computed the prompt, with those behind."""
        held = self.held(worker)
        uncached = self.prompt.tokens - held.tokens
        return worker.queue_ms(self.now) + held.copy_ms + (1 + BEHIND) * uncached * worker.token_ms

    def guess_local_ms(self, worker: Candidate) -> float:
        """Roughly, the cost of a local option."""
        held = self.held(worker)
        return (
            max(worker.queue_ms(self.now), worker.seats_ms(self.prompt.choices, EXPECTED_OUTPUT))
            + held.copy_ms
            + (self.prompt.tokens - held.tokens) * _computing_ms(worker)
            + self.together * worker.stream_ms
        )

    def missed_ms(self, ms: float, limit_ms: float) -> float:
        """What it counts that something takes so long; without a limit nothing."""
        if ms <= SAFE * limit_ms or not limit_ms:
            return 0.0
        return BROKEN * self.settings.slo_ttft_ms * min(1.0, (ms / limit_ms - SAFE) / (1 - SAFE))

    def turn_ms(self, worker: Candidate, queue_ms: float, prefill_ms: float) -> float:
        """Until the prompt's turn; `queue_ms` if that is in time, for a late one waits for all that are late, too."""
        in_time = queue_ms + prefill_ms <= self.settings.slo_ttft_ms
        return queue_ms if in_time else queue_ms + worker.passed_ms


class _Prefill:
    """The prompt on a prefill worker.

    Attributes:
        queue_ms, ms: As in Option.
        uncached: Tokens to compute.
        host_tokens: Those that come back from its host memory.
        tail: Pages of the last chunk.
        least_ms: What a remote option costs at least, beside `_Decode.decode_ms`.
    """

    def __init__(self, request: _Request, worker: Candidate) -> None:
        held = request.held(worker)
        self.worker = worker
        self.uncached = request.prompt.tokens - held.tokens
        self.host_tokens = held.returning
        self.queue_ms = worker.wait_ms(self.uncached, request.now) + held.copy_ms
        self.ms = worker.prefill(self.uncached, held.tokens).ms
        self.tail = blocks_for(min(self.uncached, worker.token_budget))
        self.least_ms = self.queue_ms + REMOTE_MS + (1 + BEHIND) * self.ms


class _Decode:
    """The request on a combined worker.

    Attributes:
        held: What the worker has of the prompt.
        decode_ms: What its decode costs, wherever the prompt is computed.
    """

    def __init__(self, request: _Request, worker: Candidate) -> None:
        prompt, settings = request.prompt, request.settings
        self.worker = worker
        self._request = request
        self.held = request.held(worker)
        self._seats_ms = worker.seats_ms(prompt.choices, EXPECTED_OUTPUT)
        self._itl_ms = worker.grown_ms(prompt.tokens, prompt.choices)
        others = worker.requests
        slower_ms = max(0.0, self._itl_ms - worker.crowded_ms)
        missed_ms = request.missed_ms(self._itl_ms, settings.slo_itl_ms)
        self._crowding_ms = others * (request.together * slower_ms + missed_ms)
        own_ms = prompt.choices * (request.together * self._itl_ms + missed_ms)
        self.decode_ms = own_ms + self._crowding_ms + self._memory_ms()

    def local(self, source: Candidate | None = None, uncached: int | None = None) -> Option:
        """The prompt is computed here.

        Args:
            source: Another worker, all of whose cached blocks come here first.
            uncached: So much of it; None: what this worker, or the source, lacks.
        """
        request, worker, held = self._request, self.worker, self.held
        first = held if source is None else request.held(source)
        tokens = request.prompt.tokens
        uncached = tokens - first.tokens if uncached is None else uncached
        pace = worker.prefill(uncached, tokens - uncached)
        missed_ms = request.missed_ms(pace.gap_ms, request.settings.slo_itl_ms)
        stutter_ms = worker.decodes * (pace.late_ms + missed_ms)
        queue_ms = max(worker.wait_ms(uncached, request.now), self._seats_ms)
        if source is None:
            queue_ms = request.turn_ms(worker, queue_ms + held.copy_ms, pace.ms)
            ttft_ms = queue_ms + pace.ms
            return self._option("", "", uncached, held.returning, queue_ms, pace.ms, 0.0, ttft_ms, stutter_ms)
        fetch_ms = worker.transfer_ms(blocks_for(first.tokens) - held.tokens // BLOCK_SIZE)
        queue_ms = max(queue_ms, REMOTE_MS + first.copy_ms + held.copy_ms + fetch_ms)
        queue_ms = request.turn_ms(worker, queue_ms, pace.ms)
        # Others' pages wait for these as others' prompts would for the prefill.
        others_ms = stutter_ms + BEHIND * fetch_ms
        name = source.worker_id
        return self._option("", name, uncached, first.returning, queue_ms, pace.ms, 0.0, queue_ms + pace.ms, others_ms)

    def remote(self, helper: _Prefill) -> Option:
        """The prompt is computed on a prefill worker."""
        moved = self.held.lacking - blocks_for(self.held.returning)
        all_ms = self.worker.transfer_ms(moved)
        tail_ms = self.worker.transfer_ms(min(moved, helper.tail))
        transfer_ms = max(tail_ms, all_ms - helper.ms)
        queue_ms = self._request.turn_ms(helper.worker, max(helper.queue_ms, self._seats_ms), helper.ms)
        ttft_ms = queue_ms + helper.ms + REMOTE_MS
        name = helper.worker.worker_id
        return self._option(
            name, "", helper.uncached, helper.host_tokens, queue_ms, helper.ms, transfer_ms, ttft_ms, 0.0
        )

    def break_even(self, chosen: Option) -> int:
        """Uncached tokens up to which a local prompt costs no more than the chosen option."""
        threshold = self._request.settings.long_prefill_tokens
        if threshold != "auto" and not chosen.cached_at:
            return threshold
        if not chosen.prefill and not chosen.cached_at:
            return self._request.prompt.tokens
        tokens = self._request.prompt.tokens
        sizes = range(1, tokens - self.held.tokens, BLOCK_SIZE)
        fitting = bisect_right(sizes, chosen.cost_ms, key=lambda uncached: self.local(uncached=uncached).cost_ms)
        return sizes[fitting - 1] if fitting else 0

    def _memory_ms(self) -> float:
        worker, request = self.worker, self._request
        wanted = self.held.lacking + request.prompt.choices * blocks_for(request.output)
        lacking = wanted > worker.free_pages + worker.cached_pages and worker.num_pages > 0
        again_ms = BLOCK_SIZE * _computing_ms(worker)
        if worker.host_page_ms:
            again_ms = min(again_ms, worker.host_page_ms)
        return DISPLACED * self.held.lacking * again_ms + lacking * BROKEN * request.settings.slo_ttft_ms

    def _option(
        self,
        prefill: str,
        cached_at: str,
        uncached: int,
        host_tokens: int,
        queue_ms: float,
        prefill_ms: float,
        transfer_ms: float,
        ttft_ms: float,
        others_ms: float,
    ) -> Option:
        request = self._request
        missed_ms = request.missed_ms(ttft_ms, request.settings.slo_ttft_ms)
        return Option(
            decode=self.worker.worker_id,
            prefill=prefill,
            cached_at=cached_at,
            uncached_tokens=uncached,
            host_tokens=host_tokens,
            queue_ms=queue_ms,
            prefill_ms=prefill_ms,
            transfer_ms=transfer_ms,
            ttft_ms=ttft_ms,
            itl_ms=self._itl_ms,
            harm_ms=others_ms + self._crowding_ms,
            cost_ms=ttft_ms + transfer_ms + missed_ms + BEHIND * prefill_ms + others_ms + self.decode_ms,
        )


def _most_promising(
    request: _Request, workers: Sequence[Candidate], warm: Sequence[Candidate], rng: Random
) -> list[_Decode]:
    """Those whose options are worth predicting; `warm` ones have some of the prompt cached."""
    if len(workers) <= COMBINED_PREDICTED:
        return [_Decode(request, worker) for worker in workers]
    local = _few(workers, COMBINED_PREDICTED, request.guess_local_ms, rng)
    remote = _few(workers, COMBINED_PREDICTED, lambda one: one.stream_ms, rng)
    most = _few(warm, WARM_PREDICTED, lambda one: -request.held(one).tokens, rng)
    return [_Decode(request, worker) for worker in {one.worker_id: one for one in (*local, *remote, *most)}.values()]


def _few(workers: Sequence[Candidate], count: int, guess: Callable[[Candidate], float], rng: Random) -> list[Candidate]:
    """The workers with the least guesses."""
    if len(workers) <= count:
        return list(workers)
    ranked = nsmallest(count, ((guess(worker), rng.random(), index) for index, worker in enumerate(workers)))
    return [workers[index] for _, _, index in ranked]


def _in_order(
    options: Sequence[tuple[Option, _Decode, _Prefill | None]], decoder: _Decode, first: _Prefill
) -> list[Candidate]:
    """The prefill workers of a decode worker's options: the chosen one, then the others as they cost."""
    others = [helper for _, other, helper in options if other is decoder and helper not in (None, first)]
    return [first.worker, *(helper.worker for helper in others if helper is not None)]

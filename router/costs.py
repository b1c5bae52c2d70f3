"""What each way to serve a request costs: predicted, in ms.

There are three ways (options): a combined worker computes the prompt itself, it has the first blocks from another one's
cache before, or a prefill worker computes the prompt. The cost is what the request makes people wait, this user and all
others, summed up:

    own wait      queue, until there is a seat among the sequences that run, what comes back from host memory, prefill,
                  and what the pages' way adds to the first gap; then a decode step a token,
                  as long as prompts beside the streams lately made it
    stutter       of each stream beside a prefill, what its tokens are late when that is over
    crowding      of each stream there, what one more stream adds to every step
    those behind  of who comes next, the prefill's time, and that of pages from another cache
    misses        a broken promise (`--slo-ttft`, `--slo-itl`), own or others', counts far more than delays do
    memory        pages that come to a worker displace what may be wanted again, and is computed then beside the streams
                  there, or comes back from host memory; without room the request waits
    uneven load   a worker that has more than its part of all requests gets another one only for a reason
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cpd.blocks import BLOCK_SIZE, blocks_for
from router.candidate import Candidate
from router.index import Prefixes

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

EVEN = 1.1
"""A worker with up to so many times its part of all requests, by its speed, has not too many."""

FEW = 2
"""Nor has one with so few: then being even says nothing."""


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


class Held(NamedTuple):
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


class Request:
    """A prompt to place among combined workers, and what is known beside them."""

    def __init__(
        self, prompt: Prompt, combined: Sequence[Candidate], cached: Prefixes, settings: PolicySettings, now: float
    ) -> None:
        self.prompt = prompt
        self.settings = settings
        self.now = now
        self.output = min(prompt.output_tokens, EXPECTED_OUTPUT)
        self.together = min(prompt.output_tokens, COMPANY)
        requests = prompt.choices + sum([worker.requests for worker in combined])
        self._requests_per_speed = EVEN * requests / sum([worker.speed for worker in combined])
        self._cached = cached
        self._nothing = Held(0, 0, 0.0, blocks_for(prompt.tokens))
        self._held: dict[str, Held] = {}

    def held(self, worker: Candidate) -> Held:
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

    def _look(self, worker: Candidate) -> Held:
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
        return Held(last, returning, blocks_for(returning) * worker.host_page_ms, lacking)

    def _tokens(self, blocks: int) -> int:
        return min(blocks * BLOCK_SIZE, self.prompt.tokens - 1)

    def guess_prefill_ms(self, worker: Candidate) -> float:
        """Roughly, until the worker has computed the prompt, with those behind."""
        held = self.held(worker)
        uncached = self.prompt.tokens - held.tokens
        return worker.queue_ms(self.now) + held.copy_ms + (1 + BEHIND) * uncached * worker.token_ms

    def guess_prompt_ms(self, worker: Candidate) -> float:
        """Roughly, what a local prompt costs there."""
        held = self.held(worker)
        return (
            max(worker.queue_ms(self.now), worker.seats_ms(self.prompt.choices, EXPECTED_OUTPUT))
            + held.copy_ms
            + (self.prompt.tokens - held.tokens) * _computing_ms(worker)
        )

    def guess_decode_ms(self, worker: Candidate) -> float:
        """Roughly, what its decode costs there."""
        return self.together * worker.stream_ms + self.uneven_ms(worker)

    def uneven_ms(self, worker: Candidate) -> float:
        """What it counts that the worker has too many, with this one: for each of those, what a lone stream waits.

        It stands for what can't be predicted: how long streams and their sessions will be, and how many of them a
        worker's end would cut off.
        """
        too_many = worker.requests + self.prompt.choices - max(FEW, self._requests_per_speed * worker.speed)
        return too_many * self.together * worker.lone_ms if too_many > 0 else 0.0

    def missed_ms(self, ms: float, limit_ms: float) -> float:
        """What it counts that something takes so long; without a limit nothing."""
        if ms <= SAFE * limit_ms or not limit_ms:
            return 0.0
        return BROKEN * self.settings.slo_ttft_ms * min(1.0, (ms / limit_ms - SAFE) / (1 - SAFE))

    def turn_ms(self, worker: Candidate, queue_ms: float, prefill_ms: float) -> float:
        """Until the prompt's turn; `queue_ms` if that is in time, for a late one waits for all that are late, too."""
        in_time = queue_ms + prefill_ms <= self.settings.slo_ttft_ms
        return queue_ms if in_time else queue_ms + worker.passed_ms


class Prefill:
    """The prompt on a prefill worker.

    Attributes:
        queue_ms, ms: As in Option.
        uncached: Tokens to compute.
        host_tokens: Those that come back from its host memory.
        tail: Pages of the last chunk.
        least_ms: What a remote option costs at least, beside `Decode.decode_ms`.
    """

    def __init__(self, request: Request, worker: Candidate) -> None:
        held = request.held(worker)
        self.worker = worker
        self.uncached = request.prompt.tokens - held.tokens
        self.host_tokens = held.returning
        self.queue_ms = worker.wait_ms(self.uncached, request.now) + held.copy_ms
        self.ms = worker.prefill(self.uncached, held.tokens).ms
        self.tail = blocks_for(min(self.uncached, worker.token_budget))
        self.least_ms = self.queue_ms + REMOTE_MS + (1 + BEHIND) * self.ms


class Decode:
    """The request on a combined worker.

    Attributes:
        held: What the worker has of the prompt.
        decode_ms: What its decode costs, wherever the prompt is computed.
    """

    def __init__(self, request: Request, worker: Candidate) -> None:
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
        self.decode_ms = own_ms + self._crowding_ms + self._memory_ms() + request.uneven_ms(worker)

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

    def remote(self, helper: Prefill) -> Option:
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


def _computing_ms(worker: Candidate) -> float:
    """Roughly, what everybody together waits for each token of a prompt that a combined worker computes."""
    return (1 + BEHIND + worker.decodes) * worker.token_ms

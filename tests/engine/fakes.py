"""A runner without a model, whose tokens depend on the content of every page that a batch names.

The "key and value" of a token is a number computed from that of the token before it, which is read from the page in the
batch; the next token depends on the numbers of the whole context. So a wrong page, slot, position or chunk border, or a
page that was reused too early, shows as a wrong token.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, Tier, blocks_for, extend_hashes
from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost
from engine.batch import Batch, Sampled, SampleRow
from engine.engine import Engine
from engine.execution.executor import Split, StepResult
from engine.types import CacheEvent, Finish, Output, Request, Reservation, SamplingParams, StepOutput, TokenLogprobs

ROOT = b"0123456789abcdef"
VOCAB = 40
GARBAGE = -1
_PRIME = (1 << 61) - 1


def next_state(before: int, token_id: int, position: int) -> int:
    """Content of a token's slot."""
    return (before * 1_000_003 + token_id * 7_919 + position * 104_729 + 12_345) % _PRIME


def states_of(token_ids: Sequence[int]) -> list[int]:
    """Content of the slots of a whole sequence."""
    states, state = [], 0
    for position, token_id in enumerate(token_ids):
        state = next_state(state, token_id, position)
        states.append(state)
    return states


def digest(numbers: Iterable[int], start: int = 0) -> int:
    """A hash of the numbers and their order."""
    for number in numbers:
        start = (start * 1_000_003 + number) % _PRIME
    return start


def choose(states: int, token_ids: int, params: SamplingParams, choice: int, prompt_len: int) -> int:
    """Chooses the next token after a context with these digests."""
    mixed = digest((states, token_ids, params.seed, choice, prompt_len))
    return mixed * 0x9E3779B97F4A7C15 % _PRIME // 1_000 % VOCAB


@dataclass(frozen=True)
class Expected:
    """The expected output of a choice."""

    token_ids: list[int]
    finish: Finish


def expected(request: Request, choice: int, max_model_len: int) -> Expected:
    """Generates a choice one token at a time, without pages, batches or caches."""
    params, position = request.params, len(request.token_ids)
    states = states_of(request.token_ids)
    state, all_states, all_tokens = states[-1], digest(states), digest(request.token_ids)
    output: list[int] = []
    while True:
        token_id = choose(all_states, all_tokens, params, choice, request.prompt_len)
        output.append(token_id)
        if token_id in params.stop_token_ids:
            return Expected(output, Finish.STOP)
        state = next_state(state, token_id, position)
        position += 1
        if position - request.prompt_len >= params.max_tokens or position >= max_model_len:
            return Expected(output, Finish.LENGTH)
        all_states, all_tokens = digest([state], all_states), digest([token_id], all_tokens)


@dataclass(eq=False)
class FakeStep:
    """A step on a lane. What it reads must not change; what it writes appears when it ends.

    Attributes:
        pages, written: Pages that it uses, and those that it writes to.
        reads, writes: Content of slots.
    """

    batch: Batch
    tokens: list[list[int]]
    pages: set[int]
    written: set[int]
    lane: "FakeLane | None" = None
    sampled: list[Sampled] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)


class FakeLane:
    """A lane of a FakeRunner.

    Args:
        by_hand: A step runs until `finish` is called; then the queued one begins.
        overlaps: A step is computed when `compute_next` is called, at the latest in `collect`.
    """

    def __init__(self, runner: "FakeRunner", share: float, *, by_hand: bool = False, overlaps: bool = False) -> None:
        self.share = share
        self.overlaps = overlaps
        self.overlapped = 0
        self._runner = runner
        self._by_hand = by_hand
        self._queued: list[FakeStep] = []
        self._step: FakeStep | None = None
        self._last: FakeStep | None = None
        self._ended: list[FakeStep] = []
        self._on_done: Callable[[], None] | None = None

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        launched = len(self._queued) + len(self._ended) + self.running
        assert launched <= (self._by_hand or batch.token_sources is not None), "the last step was not collected"
        assert batch.token_sources is None or self.overlaps, "the lane does not overlap steps"
        self.overlapped += batch.token_sources is not None
        step = self._runner.begin(batch)
        self._runner.enter(step, self)
        self._queued.append(step)
        self._on_done = on_done
        if self._by_hand:
            self._begin_queued()
        elif not self.overlaps:
            self.compute_next()

    @property
    def running(self) -> bool:
        return self._step is not None

    @property
    def waiting(self) -> int:
        """Number of steps that have not begun."""
        return len(self._queued)

    def compute_next(self) -> None:
        """Computes the next step that has not begun."""
        self._compute()
        self.finish()

    def finish(self) -> None:
        """Ends the step that runs."""
        step, self._step = self._step, None
        assert step is not None
        self._runner.end(step)
        self._ended.append(step)
        if self._by_hand:
            self._begin_queued()
        if self._on_done is not None:
            self._on_done()

    def done(self) -> bool:
        return bool(self._ended)

    def collect(self) -> StepResult:
        if self.overlaps and not self._ended:
            self.compute_next()
        assert self._ended, "no step was launched, or it would wait"
        return StepResult(self._ended.pop(0).sampled, time.perf_counter(), 1.0)

    def _begin_queued(self) -> None:
        if self._step is None and self._queued:
            self._compute()

    def _compute(self) -> None:
        self._step = self._queued.pop(0)
        self._runner.compute(self._step, self._last)
        self._last = self._step


class FakeRunner:
    """A runner as the module describes. `pages[page][offset]` is the content of a slot.

    Args:
        lanes: True if there are prefill lanes, which run by hand.
        overlaps: True if the other lanes compute in the background.

    Attributes:
        settled: True if nothing was copied since `settle`.
    """

    def __init__(self, num_pages: int, lanes: bool = False, overlaps: bool = False) -> None:
        self.num_pages, self.vocab_size = num_pages, VOCAB
        self.pages = [[GARBAGE] * BLOCK_SIZE for _ in range(num_pages)]
        self.batches: list[Batch] = []
        self.copies: list[tuple[int, int]] = []
        self.settled = True
        self.full = FakeLane(self, 1.0, overlaps=overlaps)
        self.prefill_lane = FakeLane(self, 0.5, by_hand=True)
        self.decode_lane = FakeLane(self, 0.5, overlaps=overlaps)
        self.splits = [Split(self.prefill_lane, self.decode_lane)] if lanes else []
        self.host: FakeHostMemory | None = None
        self._launched: list[FakeStep] = []

    def begin(self, batch: Batch) -> FakeStep:
        """Launches a step."""
        self.batches.append(batch)
        check_batch(batch, self.num_pages)
        written = {int(slot) // BLOCK_SIZE for slot in batch.slots}
        used = {page for row in _tables(batch) for page in row}
        return FakeStep(batch, [row.tokens.tolist() for row in batch.samples], used, written)

    def enter(self, step: FakeStep, lane: FakeLane) -> None:
        """Puts a step on a lane. Steps on other lanes must not touch its pages; steps on its own lane come before."""
        step.lane = lane
        for other in self._launched:
            if other.lane is not lane:
                assert self.full not in (lane, other.lane), "the whole device is used beside a part of it"
                assert not step.written & other.pages, "a lane writes to another's pages"
                assert not other.written & step.pages, "a lane reads what another writes"
        self._launched.append(step)

    def compute(self, step: FakeStep, before: FakeStep | None) -> None:
        """Computes a step, from the pages' content before it and what the same sequence computes in it.

        Args:
            before: The step before on its lane.
        """
        batch = step.batch
        token_ids = batch.token_ids.tolist()
        if batch.token_sources is not None:
            assert before is not None
            assert batch.num_decodes == len(token_ids) == len(batch.token_sources) == len(batch.samples)
            token_ids = [before.sampled[index].token_id for index in batch.token_sources]
            for tokens, token_id in zip(step.tokens, token_ids, strict=True):
                tokens[-1] = token_id
        contexts = []
        for s, pages in enumerate(_tables(batch)):
            start, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
            slots = [page * BLOCK_SIZE + offset for page in pages for offset in range(BLOCK_SIZE)]
            states = []
            for slot in slots[: int(batch.context_lens[s]) - (end - start)]:
                states.append(self.pages[slot // BLOCK_SIZE][slot % BLOCK_SIZE])
                step.reads[slot] = states[-1]
            for t in range(start, end):
                position, slot = int(batch.positions[t]), int(batch.slots[t])
                states.append(next_state(states[-1] if states else 0, token_ids[t], position))
                assert slot not in step.writes, "two tokens are written to one slot"
                assert slot == slots[position]
                step.writes[slot] = states[-1]
            contexts.append(states)
        step.sampled = [
            Sampled(self._token(row, tokens, batch, contexts))
            for row, tokens in zip(batch.samples, step.tokens, strict=True)
        ]

    def end(self, step: FakeStep) -> None:
        """Ends a step: what it has computed appears in the pages."""
        self._launched.remove(step)
        for slot, state in step.reads.items():
            assert self.pages[slot // BLOCK_SIZE][slot % BLOCK_SIZE] == state, "a page changed under a running step"
        for slot, state in step.writes.items():
            self.pages[slot // BLOCK_SIZE][slot % BLOCK_SIZE] = state

    def read(self, page: int) -> list[int]:
        """Reads a page for a copy out."""
        assert not any(page in step.written for step in self._launched), "a page is copied while it is written"
        return list(self.pages[page])

    def write(self, page: int, content: list[int]) -> None:
        """Writes a page for a copy back."""
        assert not any(page in step.pages for step in self._launched), "a page changes where a lane works"
        self.pages[page] = list(content)

    def copy_page(self, source: int, target: int) -> None:
        for step in self._launched:
            assert target not in step.pages, "a page is copied to where a lane works"
            assert source not in step.written, "a page is copied while it is written"
        self.copies.append((source, target))
        self.settled = False
        self.pages[target] = list(self.pages[source])

    def settle(self) -> None:
        self.settled = True

    def _token(self, row: SampleRow, tokens: list[int], batch: Batch, contexts: list[list[int]]) -> int:
        s = int(np.searchsorted(batch.query_start, row.row, side="right")) - 1
        assert row.row == batch.query_start[s + 1] - 1, "a row in the middle of a chunk is sampled"
        assert row.position == batch.context_lens[s] == len(tokens)
        return choose(digest(contexts[s]), digest(tokens), row.params, row.choice, row.prompt_len)


@dataclass(eq=False)
class _CopyBack:
    slots: list[int]
    pages: list[int]
    on_done: Callable[[], None]
    future: Future[int]


class FakeHostMemory:
    """Host memory beside a FakeRunner's pages. See `engine.kv.host_tier.HostMemory`.

    Args:
        by_hand: A copy back lasts until `finish` is called.

    Attributes:
        damaged: Slots whose content is damaged.
    """

    def __init__(self, runner: FakeRunner, num_slots: int, slot_ms: float = 0.001, *, by_hand: bool = False) -> None:
        self.num_slots = num_slots
        self.slot_ms = slot_ms
        self.by_hand = by_hand
        self.damaged: set[int] = set()
        self.copied_out: list[list[int]] = []
        self.slots = [[GARBAGE] * BLOCK_SIZE for _ in range(num_slots)]
        self._runner = runner
        self._copies: list[_CopyBack] = []

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        busy = {slot for copy in self._copies for slot in copy.slots}
        assert busy.isdisjoint(slots), "a slot changes while it is read"
        self.copied_out.append(list(pages))
        for page, slot in zip(pages, slots, strict=True):
            self.slots[slot] = self._runner.read(page)
            self._runner.settled = False
            self.damaged.discard(slot)

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        copy = _CopyBack(list(slots), list(pages), on_done, Future())
        self._copies.append(copy)
        if not self.by_hand:
            self.finish()
        return copy.future

    def finish(self) -> None:
        """Ends the first copy under way."""
        copy = self._copies.pop(0)
        good = 0
        for slot, page in zip(copy.slots, copy.pages, strict=True):
            if slot in self.damaged:
                break
            self._runner.write(page, self.slots[slot])
            good += 1
        copy.future.set_result(good)
        copy.on_done()


class Cache(Protocol):
    """Something with cached blocks."""

    def cached_hashes(self, tier: Tier) -> list[bytes]: ...


def cached(cache: Cache) -> dict[bytes, Tier]:
    """The tier of each cached block."""
    hashes = [(block_hash, tier) for tier in (Tier.PAGES, Tier.HOST) for block_hash in cache.cached_hashes(tier)]
    assert len(dict(hashes)) == len(hashes), "a block is in two tiers"
    return dict(hashes)


def follow(known: dict[bytes, Tier], events: Iterable[CacheEvent]) -> None:
    """Applies cache events to the known blocks of a cache. Each event must change something."""
    for event in events:
        assert event.hashes
        for block_hash in event.hashes:
            assert known.pop(block_hash, Tier.NONE) is not event.tier
            if event.tier is not Tier.NONE:
                known[block_hash] = event.tier


def _tables(batch: Batch) -> list[list[int]]:
    """The pages of each sequence's context."""
    return [
        table[: blocks_for(int(context))].tolist()
        for table, context in zip(batch.block_tables, batch.context_lens, strict=True)
    ]


def check_batch(batch: Batch, num_pages: int) -> None:
    """Asserts that a batch is as `engine/batch.py` says."""
    counts = np.diff(batch.query_start)
    size = len(batch.context_lens)
    assert batch.query_start[0] == 0
    assert batch.query_start[-1] == len(batch.token_ids) == len(batch.positions) == len(batch.slots)
    assert (counts[: batch.num_decodes] == 1).all()
    assert (counts[batch.num_decodes :] > 1).all()
    assert batch.block_tables.shape == (size, blocks_for(int(batch.context_lens.max())))
    for array in (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_lens):
        assert array.dtype == np.int32
    assert ((batch.block_tables >= 0) & (batch.block_tables < num_pages)).all()
    for s in range(size):
        positions = batch.positions[batch.query_start[s] : batch.query_start[s + 1]]
        assert positions.tolist() == list(range(int(batch.context_lens[s] - counts[s]), int(batch.context_lens[s])))
        assert not batch.block_tables[s, blocks_for(int(batch.context_lens[s])) :].any()


def make_request(
    name: str,
    token_ids: Sequence[int],
    *,
    prompt_len: int | None = None,
    max_tokens: int = 8,
    stop: Sequence[int] = (),
    seed: int = 0,
    n: int = 1,
    prefill_only: bool = False,
) -> Request:
    """Makes a request, without stop tokens unless given."""
    return Request(
        id=name,
        token_ids=list(token_ids),
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        params=SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset(stop)),
        hash_root=ROOT,
        block_hashes=extend_hashes(ROOT, token_ids),
        n=n,
        prefill_only=prefill_only,
    )


def prompt(length: int, start: int = 0) -> list[int]:
    """Makes the tokens of a prompt. Prompts with different starts share no block."""
    return [(start * 13 + i * 7 + i // 5) % VOCAB for i in range(length)]


@dataclass
class Served:
    """The outputs of an engine, by (request, choice)."""

    token_ids: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finish: dict[tuple[str, int], Finish] = field(default_factory=dict)
    cached_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, step: StepOutput) -> None:
        """Adds a step's outputs."""
        for output in step.outputs:
            self.take_output(output)
        self.failed.update(step.failed)

    def take_output(self, output: Output) -> None:
        """Adds one output. None may follow the last one, and only the first one may have `cached_tokens`."""
        key = (output.request_id, output.choice)
        assert key not in self.finish, "an output after the last one"
        assert (output.cached_tokens is not None) == (key not in self.token_ids)
        if output.cached_tokens is not None:
            self.cached_tokens[key] = output.cached_tokens
        self.token_ids.setdefault(key, []).extend(output.token_ids)
        self.logprobs.setdefault(key, []).extend(output.logprobs)
        if output.finish is not None:
            self.finish[key] = output.finish


def drain(engine: Engine, served: Served | None = None, max_steps: int = 10_000) -> Served:
    """Steps until the engine has no more work; checks its records after each step."""
    served = served or Served()
    for _ in range(max_steps):
        if not engine.has_work:
            return served
        served.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps")


def arrive(engine: Engine, runner: FakeRunner, reservation: Reservation, request: Request, served: Served) -> None:
    """Acts as a prefill worker: fills the reserved pages, and hands over each choice's first token."""
    _write(runner, reservation, request)
    first = []
    for choice in range(request.first_choice, request.first_choice + request.n):
        want = expected(request, choice, engine.max_model_len)
        finish = want.finish if len(want.token_ids) == 1 else None
        first.append(Output(request.id, choice, want.token_ids[:1], [], finish, cached_tokens=0))
        served.take_output(first[-1])
    assert engine.landings.activate(reservation, request, first) == []


def arrive_first_blocks(engine: Engine, runner: FakeRunner, reservation: Reservation, request: Request) -> None:
    """Acts as another worker's cache: fills the reserved pages with the first blocks."""
    _write(runner, reservation, request)
    engine.landings.add_to_cache(reservation, request)


def _write(runner: FakeRunner, reservation: Reservation, request: Request) -> None:
    states = states_of(request.token_ids)
    for index, page in enumerate(reservation.pages):
        start = (reservation.first_block + index) * BLOCK_SIZE
        content = states[start : start + BLOCK_SIZE]
        runner.pages[page] = content + [GARBAGE] * (BLOCK_SIZE - len(content))


COST = StepCost(tokens=(1, 8, 108), tokens_ms=(1, 1, 101))
MODEL = PerfModel(
    Profile(
        schema="cpd-profile/1",
        source="roofline",
        device="none",
        model="none",
        shares=(ShareProfile(share=1, decode=COST, prefill=COST),),
    )
)
"""Up to 8 tokens take 1 ms, each further one 1 ms more."""


def engine_of(
    runner: FakeRunner,
    *,
    max_model_len: int = 512,
    token_budget: int = 64,
    max_num_seqs: int = 8,
    max_queue_tokens: int = 100_000,
    max_wait_s: float = inf,
    itl_ms: float = 0.0,
    colocate: Mode = "mixed",
    host: FakeHostMemory | None = None,
) -> Engine:
    """Makes a small engine."""
    return Engine(
        runner,
        max_model_len=max_model_len,
        colocation=Colocation(
            MODEL,
            token_budget=token_budget,
            mode=colocate,
            splits=[split.shares for split in runner.splits],
            itl_ms=itl_ms,
        ),
        max_num_seqs=max_num_seqs,
        max_queue_tokens=max_queue_tokens,
        max_wait_s=max_wait_s,
        host=host,
    )


def make_engine(
    num_pages: int = 64, *, colocate: Mode = "mixed", overlaps: bool = False, host_pages: int = 0, **options: int
) -> tuple[Engine, FakeRunner]:
    """Makes a small engine and its runner. Options as in `engine_of`."""
    runner = FakeRunner(num_pages, lanes=colocate != "mixed", overlaps=overlaps)
    if host_pages:
        runner.host = FakeHostMemory(runner, host_pages)
    return engine_of(runner, colocate=colocate, host=runner.host, **options), runner


def assert_as_expected(served: Served, engine: Engine, *requests: Request) -> None:
    """Asserts that every choice of these requests has the expected output."""
    for request in requests:
        for choice in range(request.first_choice, request.first_choice + request.n):
            want = expected(request, choice, engine.max_model_len)
            assert served.token_ids[request.id, choice] == want.token_ids
            assert served.finish[request.id, choice] is want.finish


def assert_all_released(engine: Engine) -> None:
    """Asserts that every page is free or cached."""
    engine.check_integrity()
    pages = engine.stats().pages
    assert (pages.used, pages.reserved, pages.quarantined) == (0, 0, 0)

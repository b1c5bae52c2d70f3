"""The engine: requests in, tokens out, one step at a time.

    add ──▶ scheduler ──plan──▶ build_batch ──▶ lane.launch … collect ──▶ output processor ──▶ outputs

A lane is a fixed share of the device with its own stream. A step's batch runs on the full lane (the whole device), or
on the decode lane while the prefill lane computes a prompt. `cpd/performance/colocation.py` decides where prefills go,
`engine/inflight.py` what is launched before what is collected.

The engine runs on one thread and never reads a clock. Between two steps its state is consistent: pages are released and
blocks published only when the step that touches them has been collected.

It may have to give the device's memory away for a while:

    serving ──hold_new──▶ draining ──pause──▶ paused ──park_all──▶ paused, and all pages are free
       ▲──────────────go_on──┴───────────go_on──┴──────────go_on──────┘

Draining, it starts no new sequences; paused, it launches no steps. Then `park_all` preempts the sequences and evicts
the cached blocks, so that the content of the pages does not matter any more. Requests can be added and aborted in all
of these states.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, Tier, blocks_for
from cpd.performance.colocation import Colocation
from cpd.performance.model import Work
from engine.execution.executor import Executor, Split, StepResult
from engine.inflight import InFlight, InFlightStep
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostMemory, HostTier
from engine.landings import Landings
from engine.output_processor import OutputProcessor
from engine.scheduling import lookahead
from engine.scheduling.fair_queue import overdue_part
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.plan import BuildBatch, Plan, build_batch
from engine.scheduling.queue_limit import QueueLimit
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SequenceState
from engine.scheduling.waiting_queue import MayStart
from engine.trace import StepTimes, StepTrace
from engine.types import CacheEvent, EngineStats, HostStats, Request, StepOutput


class Engine:
    """One model's scheduler, paged cache and step loop.

    Args:
        executor: Runs the batches.
        max_model_len: Maximum tokens of a sequence. The pool's size may limit it further.
        colocation: Decides where prefills go while there are decodes.
        max_num_seqs: Maximum number of running sequences.
        max_queue_tokens: Maximum tokens of requests that have not been scheduled yet.
        max_wait_s: Longest time that these requests should wait; more are refused.
        build: Makes the batches. A simulated executor, which computes nothing, needs only their sizes and samples.
        host: Host memory for evicted blocks; None: they are lost.
        window: The last tokens, itself included, that a token attends to in any layer; 0 for all.

    Attributes:
        max_model_len: Maximum tokens of a sequence that can be served.
        max_num_seqs: Maximum number of running sequences.
        colocation: Decides where prefills go while there are decodes.
        host_pages: Maximum number of blocks in host memory.
        host_page_ms: Time to load one of them.
        landings: Pages that other workers write into.
        scheduler, outputs, in_flight, times: The parts of a step, and statistics of step durations, for code that makes
            steps in its own way, as the simulator's fast-forward does.
        trace: Records of the last steps.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_model_len: int,
        colocation: Colocation,
        max_num_seqs: int,
        max_queue_tokens: int,
        max_wait_s: float = inf,
        build: BuildBatch = build_batch,
        host: HostMemory | None = None,
        window: int = 0,
    ) -> None:
        self.max_model_len = min(max_model_len, executor.num_pages * BLOCK_SIZE)
        self.max_num_seqs = min(max_num_seqs, colocation.max_tokens)  # a step must hold one token of each
        self._max_queue_tokens = max_queue_tokens
        self.host_pages = host.num_slots if host is not None else 0
        self.host_page_ms = host.slot_ms if host is not None else 0.0
        self._on_work: Callable[[], None] = lambda: None
        self._pool = BlockPool(executor.num_pages)
        self._host = HostTier(self._pool, host, lambda work: colocation.prefill_ms(work, Work())) if host else None
        self._cache = KVCacheManager(self._pool, executor.copy_page, self._host, lambda: self._on_work())
        self.scheduler = Scheduler(
            self._cache,
            max_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_tokens=colocation.max_tokens,
            limit=QueueLimit(
                lambda tokens: colocation.prefill_ms(Work.prefill(tokens), Work()) / 1000, max_wait_s=max_wait_s
            ),
            prefill_ms=colocation.prefill_ms,
            window=window,
        )
        self.colocation = colocation
        self._splits = {split.shares: split for split in executor.splits}
        self.in_flight = InFlight(executor.full, self._pool, self.scheduler.table, build)
        self.outputs = OutputProcessor(self.scheduler, self.in_flight.release)
        self.landings = Landings(self._pool, self.scheduler, self.outputs, executor.settle)
        self.times = StepTimes()
        self.trace = StepTrace()
        self._pins: Counter[int] = Counter()
        self._idle_at = -1  # the version at which there was nothing to compute

    def add(self, request: Request, *, resumed: bool = False) -> None:
        """Puts a request in the waiting queue.

        Args:
            resumed: The request goes on after a pause: before all that were never scheduled, and without a queue limit.

        Raises:
            QueueFullError: The waiting queue is full (see `engine/scheduling/queue_limit.py`).
            ValueError: The request can never be served here.
        """
        self.outputs.check(request)
        choices = list(range(request.first_choice, request.first_choice + request.n))
        if resumed:
            self.scheduler.resume(self.outputs.open(request, choices))
            return
        limit = self.scheduler.waiting.limit
        limit.check(request.tenant, len(request.token_ids), self._max_queue_tokens, request.received)
        self.scheduler.add(self.outputs.open(request, choices))

    def abort(self, request_id: str, choices: Sequence[int] | None = None) -> None:
        """Ends these choices of a request (None: all of them), whatever their state. Unknown ones are ignored.

        The caller cancels the request's reservation, if it has one.
        """
        self.outputs.end_choices(request_id, choices)

    def park(self, request_id: str) -> list[int] | None:
        """Ends a request, and pins the cached blocks of its sequences. Tokens in flight are dropped.

        Blocks of preempted sequences are pinned only if running sequences can't need their pages.

        Returns:
            The pages for `unpin`; None if there is no such request.
        """
        seqs = self.outputs.seqs_of(request_id)
        if not seqs:
            return None
        pages: list[int] = []
        for seq in seqs:
            if seq.state is SequenceState.RUNNING:  # it holds these pages
                found = self._pool.find(seq.hashes)
                self.pin(found)
                pages += found
        hashes = [seq.hashes for seq in seqs if seq.state is not SequenceState.RUNNING]
        self.abort(request_id)
        for chain in hashes:
            pages += self.pin_cached(chain)
        return pages

    # ---- without the device's memory ----

    @property
    def starts_new(self) -> bool:
        """False while the engine drains or is paused."""
        return self.scheduler.waiting.may_start is MayStart.ALL

    @property
    def paused(self) -> bool:
        """True while no steps are launched."""
        return self.scheduler.waiting.may_start is MayStart.NONE

    def hold_new(self) -> None:
        """Starts no new sequences until `go_on`. Those that were scheduled before go on."""
        self.scheduler.hold(MayStart.SCHEDULED_BEFORE)

    def pause(self) -> None:
        """Launches no steps, loads no blocks and reserves no landings until `go_on`. Steps in flight are collected."""
        self.scheduler.hold(MayStart.NONE)

    def go_on(self, now: float) -> None:
        """Schedules all sequences again; those that ran before come first.

        Args:
            now: The current time, as in `step`.
        """
        self.scheduler.go_on(now)

    def park_all(self) -> bool:
        """Frees every page of a paused engine.

        Running sequences are preempted and keep their tokens. Their blocks go to host memory, if there is any; of the
        other cached blocks, as many as one eviction offloads. The rest is lost.

        Returns:
            False if steps in flight, loads, pins or landings hold pages: try again after a step, or when `version` has
            changed.
        """
        assert self.paused
        if self.in_flight.main:
            return False
        valuable = self.scheduler.park()
        loading = self._host is not None and self._host.is_loading
        if self.in_flight.prefill or loading or self._pins or self.landings or self.outputs.pages_to_release:
            return False
        self._cache.evict_all(valuable)
        return True

    @property
    def version(self) -> int:
        """Changes when results may change: of `landings.reserve`, `block_to_wait_for`, `loading`, `uncached_tokens` and
        `park_all`."""
        return self.scheduler.version + self._pool.publications

    @property
    def has_work(self) -> bool:
        """True if a step would do something.

        False also when everything waits for pages that others hold (reservations, pins), for the prefill lane, or for
        blocks from host memory. Ask again after the next call that changes the engine, and when `set_work_callback`'s
        callback is called.
        """
        return self.has_results or (bool(self.outputs) and self._idle_at != self.scheduler.version)

    @property
    def has_results(self) -> bool:
        """True if the next step collects something, or releases the pages of requests that ended in the last one."""
        loaded = self._host is not None and self._host.done
        return bool(self.in_flight.main or self.in_flight.prefill_done or loaded or self.outputs.pages_to_release)

    @property
    def prefill_lane_chunk_number(self) -> int:
        """Id, counted from 1, of the chunk that the prefill lane computes; 0 if it is idle. Any thread may ask."""
        return self.in_flight.prefill_chunk_number

    def set_work_callback(self, callback: Callable[[], None]) -> None:
        """Sets the function to call, on any thread, when the prefill lane or a load from host memory is done."""
        self._on_work = callback

    def step(self, now: float = 0.0) -> StepOutput:
        """Makes one step: schedules, launches, collects and processes.

        Pin the pages of `StepOutput.computed` before the next call.

        Args:
            now: The current time in seconds, on the clock of the requests' `received` and `deadline`.
        """
        output = StepOutput()
        self._release_finished()
        self.scheduler.take_loaded()
        if not self.in_flight.main:  # otherwise it was launched ahead
            self._launch(*self._schedule(now))
        if self.in_flight.main:
            self._launch_ahead(now)
            self._process(*self.in_flight.collect(), output)
        else:
            self._idle(output, now)
        # Last, because scheduling after this could preempt the sequences of `computed` and reuse their pages before the
        # caller pins them.
        while self.in_flight.prefill_done:
            self._process(*self.in_flight.collect_prefill(), output)
            self._launch_next_chunk()
        return output

    def uncached_tokens(self, request: Request) -> int:
        """Number of tokens that a prefill of this request would compute now."""
        num_tokens = len(request.token_ids)
        return max(1, num_tokens - self._cache.cached_blocks(request.block_hashes, num_tokens) * BLOCK_SIZE)

    def block_to_wait_for(self, request: Request, blocks: int | None = None) -> bytes | None:
        """Returns the block to wait for if the first block that the cache lacks is being computed or received.

        It is the last block, among the first `blocks`, that comes from the same source without a gap.
        """
        hashes = request.block_hashes[:blocks]
        return self._cache.pending.last_shared(hashes, len(self._pool.find(hashes)))

    def is_pending(self, block_hash: bytes) -> bool:
        """True if this block is being computed or received."""
        return self._cache.pending.has_producer(block_hash)

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps used or cached pages unchanged while a transfer reads them."""
        self._pool.hold(pages)
        self._pins.update(pages)

    def pin_cached(self, hashes: Sequence[bytes]) -> list[int]:
        """Pins the pages of the longest cached prefix of a hash chain; none if running sequences may need them."""
        pages = self._pool.find(hashes)
        left = self._pool.available_beside(pages)
        if left < self._pool.available and left < self.scheduler.headroom:  # pages that are held anyway cost nothing
            return []
        self.pin(pages)
        return pages

    def unpin(self, pages: Sequence[int]) -> None:
        """Takes one pin off each page.

        Raises:
            ValueError: A page is not pinned.
        """
        pins, gone = self._pins, Counter(pages)
        left = [pins[page] - count for page, count in gone.items()]
        if min(left, default=0) < 0:
            raise ValueError(f"not all of the pages {list(pages)} are pinned")
        for page, count in zip(gone, left, strict=True):
            if count:
                pins[page] = count
            else:
                pins.pop(page)  # a Counter's own `del` is slow
        self._pool.release(pages)

    def load(self, hashes: Sequence[bytes]) -> None:
        """Loads the blocks after the cached prefix that are only in host memory, if that is faster than computing."""
        if self.paused:
            return
        found = self._pool.find(hashes)
        self._cache.load(hashes, found, len(hashes) * BLOCK_SIZE, self.scheduler.headroom)

    def loading(self, hashes: Sequence[bytes]) -> bool:
        """True if the first block of a chain that is not in a page is being loaded from host memory."""
        if self._host is None or not self._host.is_loading:
            return False
        found = len(self._pool.find(hashes))
        return found < len(hashes) and self._host.loads(hashes[found])

    def stats(self, now: float = 0.0) -> EngineStats:
        """Figures for a load report at the time `now`, as in `step`."""
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        decodes, remaining = scheduler.running_work()
        prefill_ms = partial(self.colocation.prefill_ms, decodes=decodes, slowdown=self.times.slowdown_p90)
        late_ms = prefill_ms(waiting.late_work(now + prefill_ms(remaining) / 1e3))
        remaining += waiting.queued_work
        remaining_ms = prefill_ms(remaining)
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=remaining.tokens,
            pages=self._pool.counts(),
            preemptions=scheduler.preemptions,
            prefill_tokens=self.outputs.prefill_tokens,
            decode_tokens=self.outputs.decode_tokens,
            cached_tokens=scheduler.cached_tokens,
            queued_tokens=waiting.limit.tokens,
            decodes=decodes.seqs,
            decode_context=decodes.context,
            prefill_ms=remaining_ms,
            overdue_ms=overdue_part(remaining_ms, late_ms),
            step_ms=self.times.decode_ms,
            slowdown=self.times.slowdown,
            host=self._host.stats() if self._host is not None else HostStats(),
            awaiting_first_token=self.outputs.awaiting_first_token(),
            started=scheduler.num_started,
            resumed=sum(seq.parked for seq in scheduler.running),
        )

    def take_cache_events(self) -> list[CacheEvent]:
        """Takes the changes of the cache since the last call, in order: blocks in pages, in host memory, or lost."""
        return self._pool.take_events()

    def cached_hashes(self, tier: Tier) -> list[bytes]:
        """All blocks that are in this tier now, the effect of events not yet taken included."""
        return self._pool.cached_hashes(tier)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has exactly one owner and all records agree.

        For idle moments and tests: takes about 10 ms for 100,000 pages.
        """
        self._pool.check_integrity()
        self.scheduler.check_integrity(self.landings.num_live)
        self.landings.check_integrity()
        held = self.scheduler.held_pages() + self.landings.held_pages() + self.outputs.pages_to_release
        held += self.in_flight.held_pages()
        held += self._pins.elements()
        if self._host is not None:
            self._host.check_integrity()
            held += self._host.held_pages()
        holders = np.bincount(np.array(held, dtype=np.int64), minlength=self._pool.num_pages)
        if (holders != self._pool.refcounts()).any():
            wrong = int(np.flatnonzero(holders != self._pool.refcounts())[0])
            raise AssertionError(f"page {wrong} has {holders[wrong]} known holders, but the pool counts another number")
        if {id(seq) for seq in self.outputs.seqs()} != {id(seq) for seq in self.scheduler.seqs()}:
            raise AssertionError("requests have other sequences than the scheduler")

    def _release_finished(self) -> None:
        """Releases the pages of finished prefill-only requests: the caller has had the chance to pin them."""
        if self.outputs.pages_to_release:
            self._pool.release(self.outputs.pages_to_release)
            self.outputs.pages_to_release = []

    def _schedule(self, now: float) -> tuple[Plan, Plan | None, Split | None]:
        """Decides what is computed next: the main lane's plan, and the prefill lane's plan and split, if any."""
        if self.paused:
            return Plan(), None, None
        plan = self.scheduler.schedule_decodes()
        if self.scheduler.wants_prefill(now):
            in_use = self.in_flight.split
            busy = in_use.shares if in_use else None
            budget, chosen = self.colocation.prefill_budget(
                plan.work, busy, self.times.slowdown_p90, waiting=max(0, self.scheduler.num_waiting - 1)
            )
            if lane_plan := self.scheduler.schedule_prefills(plan, budget, now):
                assert chosen is not None
                return plan, lane_plan, self._splits[chosen]
        return plan, None, None

    def _launch(self, plan: Plan, lane_plan: Plan | None = None, split: Split | None = None) -> None:
        """Starts the prefill lane, then a step on the main lane: the full one, or the decode lane of the split."""
        if split is not None and lane_plan is not None:
            self._launch_prefill(split, lane_plan)
            self._launch_next_chunk()
        if plan:
            work, lane = plan.work, self.in_flight.main_lane
            predicted_ms = self.colocation.model.step_ms(work, lane.share, self.in_flight.prefill_work)
            self.in_flight.launch(plan, work, predicted_ms)

    def _launch_ahead(self, now: float) -> None:
        """Launches the step after the one in flight, if it can be planned before that one's tokens are known."""
        (step,) = self.in_flight.main  # one: the step before it has been collected, and none is launched ahead yet
        if self.paused:
            return
        if step.lane.overlaps and step.lane is self.in_flight.main_lane and not self.in_flight.prefill_done:
            self._launch(lookahead.overlapped_decodes(self.scheduler, step.plan, now))

    def _launch_next_chunk(self) -> None:
        """Queues the prompt's next chunk on the prefill lane, unless another split suits the decodes better."""
        split = self.in_flight.split
        if split is None or self.paused:
            return
        decodes, _ = self.scheduler.running_work()
        budget, chosen = self.colocation.prefill_budget(
            decodes, None, self.times.slowdown_p90, waiting=self.scheduler.num_waiting
        )
        if chosen == split.shares:
            plan = lookahead.next_lane_chunk(self.scheduler, self.in_flight.prefill[-1].plan, decodes, budget)
            if plan:
                self._launch_prefill(split, plan)

    def _launch_prefill(self, split: Split, plan: Plan) -> None:
        self.in_flight.launch_prefill(split, plan, self._on_work)
        self.scheduler.lane_launched(plan)

    def _process(self, step: InFlightStep, result: StepResult, output: StepOutput) -> None:
        """Turns the sampled tokens of a collected step into outputs, and records the step."""
        if step.lane_kind == "prefill":
            self.scheduler.lane_collected(step.plan)
        else:
            self.times.add(result.ms, step.predicted_ms, decodes=bool(step.plan.decodes))
        self.outputs.process(step.plan, result.sampled, output)
        self.trace.add(step, result, self.scheduler.num_waiting, self.scheduler.waiting.limit.tokens)

    def _idle(self, output: StepOutput, now: float) -> None:
        """Notes that nothing can be computed. Fails the request that is stuck, unless pages may become available."""
        self._idle_at = self.scheduler.version
        if self.paused:
            return
        seq = self.scheduler.stuck(now)
        loading = self._host is not None and self._host.is_loading
        if seq is None or self.in_flight.prefill or self.landings.num_live or self._pins or loading:
            return
        self.outputs.end_choices(seq.request.id)
        reason = (
            f"it needs {blocks_for(seq.num_tokens)} KV pages; the pool has {self._pool.num_pages}, with "
            f"{self._pool.counts().quarantined} in quarantine after broken transfers"
        )
        output.failed.append((seq.request.id, reason))

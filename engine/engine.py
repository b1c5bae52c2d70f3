"""The engine: requests in, tokens out, one step at a time.

    add ──▶ scheduler ──plan──▶ build_batch ──▶ lane.launch … collect ──▶ output processor ──▶ outputs

A step's batch runs on the whole device, or on the decode lane while the prefill lane computes something else; where
prefills go is decided by `cpd/performance/colocation.py`. `engine/inflight.py` says what is launched before what is
collected.

Runs on one thread and never reads a clock. Whatever is called between two steps sees a consistent state: pages are
released and blocks published only when the step that touches them has been collected.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, Tier, blocks_for
from cpd.performance.colocation import Colocation
from cpd.performance.model import Work
from engine.execution.executor import Executor, StepResult
from engine.inflight import InFlight, InFlightStep
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostMemory, HostTier
from engine.kv.landing_reservations import LandingReservations
from engine.output_processor import OutputProcessor
from engine.scheduling import lookahead, sequence
from engine.scheduling.fair_queue import passed
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.plan import BuildBatch, Plan, build_batch
from engine.scheduling.queue_limit import QueueLimit
from engine.scheduling.scheduler import Scheduler
from engine.trace import StepTrace
from engine.types import CacheEvent, EngineStats, HostStats, Output, Request, Reservation, StepOutput

RECENT_STEPS = 32
"""Steps whose times the load report tells."""

MIN_STEPS_TO_COMPARE = 8
"""Fewer steps do not tell how much slower than predicted they are."""


class Engine:
    """One model's scheduler, paged cache and step loop.

    Args:
        executor: Runs the batches.
        max_model_len: Tokens of the longest sequence. The pool's size may limit it further.
        colocation: Where prefills go while there are decodes.
        max_num_seqs: Sequences that run at the same time, at most.
        max_queue_tokens: Most tokens of requests that have not been scheduled yet.
        build: Makes the batches; an executor that computes nothing needs less in them.
        host: Where evicted blocks are offloaded to; None: nowhere.

    Attributes:
        max_model_len: Tokens of the longest sequence that can be served.
        max_num_seqs: Sequences that run at the same time, at most.
        colocation: As given; it never changes.
        host_pages: Most blocks that are offloaded.
        host_page_ms: How long it takes to load one of them.
        trace: Of the last steps.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_model_len: int,
        colocation: Colocation,
        max_num_seqs: int,
        max_queue_tokens: int,
        build: BuildBatch = build_batch,
        host: HostMemory | None = None,
    ) -> None:
        self.max_model_len = min(max_model_len, executor.num_pages * BLOCK_SIZE)
        self.max_num_seqs = min(max_num_seqs, colocation.max_tokens)  # so that each advances in each step
        self._executor = executor
        self._max_queue_tokens = max_queue_tokens
        self.host_pages = host.num_slots if host is not None else 0
        self.host_page_ms = host.slot_ms if host is not None else 0.0
        self._on_work: Callable[[], None] = lambda: None
        self._pool = BlockPool(executor.num_pages)
        self._host = HostTier(self._pool, host, lambda work: colocation.prefill_ms(work, Work())) if host else None
        self._cache = KVCacheManager(self._pool, executor.copy_page, self._host, lambda: self._on_work())
        self._scheduler = Scheduler(
            self._cache,
            max_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            limit=QueueLimit(lambda tokens: colocation.prefill_ms(Work.prefill(tokens), Work()) / 1000),
            step_ms=colocation.model.step_ms,
        )
        self.colocation = colocation
        self._splits = {split.shares: split for split in executor.splits}
        self._in_flight = InFlight(executor.full, self._pool, self._scheduler.table, build)
        self._reservations = LandingReservations(self._pool)
        self._outputs = OutputProcessor(self._scheduler, self._in_flight.release)
        self.trace = StepTrace()
        self._pins: Counter[int] = Counter()
        self._step_ms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._slower: deque[float] = deque(maxlen=RECENT_STEPS)
        self._idle_at = -1  # the version at which there was nothing to compute

    def add(self, request: Request) -> None:
        """Puts a request in the waiting queue.

        Raises:
            QueueFullError: The queue holds its `max_queue_tokens` (`engine.scheduling.queue_limit` has the rule).
            ValueError: The request can never be served here.
        """
        self._outputs.check(request)
        limit = self._scheduler.waiting.limit
        limit.check(request.tenant, len(request.token_ids), self._max_queue_tokens, request.received)
        choices = list(range(request.first_choice, request.first_choice + request.n))
        self._scheduler.add(self._outputs.open(request, choices))

    def abort(self, request_id: str, choices: Sequence[int] | None = None) -> None:
        """Ends these choices of a request (None: all) in whatever state they are. Unknown ones are ignored.

        A reservation for the request is the caller's to cancel.
        """
        self._outputs.end_choices(request_id, choices)

    @property
    def version(self) -> int:
        """Changes whenever `reserve`, `pending`, `loading` or `uncached_tokens` may answer otherwise than before."""
        return self._scheduler.version + self._pool.publications

    @property
    def has_work(self) -> bool:
        """Whether a step would do something.

        False also when everything waits for pages that others hold (reservations, pins), for the prefill lane, or for
        blocks from host memory: ask again after the next call that changes the engine, and when `on_work` calls.
        """
        return self._to_collect or (bool(self._outputs) and self._idle_at != self._scheduler.version)

    @property
    def prefill_lane_chunk(self) -> int:
        """The number of the chunk that the prefill lane has to end next; 0: it has none. Any thread may ask."""
        return self._in_flight.prefill_number

    def on_work(self, callback: Callable[[], None]) -> None:
        """Has `callback` called, on any thread, whenever the prefill lane or the host tier is done with something."""
        self._on_work = callback

    def step(self, now: float = 0.0) -> StepOutput:
        """Schedules and launches, unless a step was launched ahead; collects it and what the prefill lane is done with.

        Pin the pages of `computed` before the next call.

        Args:
            now: The time of the requests' `received` and `deadline`, in seconds.
        """
        output = StepOutput()
        self._release_shown()
        self._scheduler.take_loaded()
        if not self._in_flight.main:
            plan = self._schedule(now)
            if plan:
                self._launch(plan)
            else:
                self._idle(output, now)
        if self._in_flight.main:
            self._launch_overlapped(now)
            self._process(*self._in_flight.collect(), output)
        # Last, because the pages of `computed` must be as they are when the caller sees them.
        while self._in_flight.prefill_done:
            self._process(*self._in_flight.collect_prefill(), output)
            self._launch_next_chunk()
        return output

    @property
    def uneventful_steps(self) -> int:
        """How many steps from now on each bring just the next token of each sequence that is not on the prefill lane.

        A simulator, which knows that none of them is a stop token, may make them at once (`decoding`, `extend`, then
        `end_uneventful`) if nothing comes from outside meanwhile and no chunk on the prefill lane ends before.
        """
        return 0 if self._to_collect else lookahead.uneventful_steps(self._scheduler)

    @property
    def decoding(self) -> list[sequence.Sequence]:
        """The sequences that get a token in each uneventful step."""
        return self._scheduler.decoding

    def last_token(self, seq: sequence.Sequence) -> int:
        """The last token of a decoding sequence."""
        return int(self._scheduler.table.rows[seq.row][seq.num_tokens - 1])

    @property
    def decode_share(self) -> float:
        """The share of the device that decodes have now."""
        return self._in_flight.main_lane.share

    def extend(self, seq: sequence.Sequence, token_ids: list[int]) -> None:
        """A decoding sequence gets the tokens of some uneventful steps, and what pages and blocks come with them."""
        self._scheduler.extend(seq, token_ids)

    def end_uneventful(
        self, work: Work, ms: Sequence[float], tokens: Iterable[tuple[sequence.Sequence, list[int]]]
    ) -> StepOutput:
        """Uneventful steps have been made.

        Args:
            work: What the first of them computed.
            ms: How long each of them took.
            tokens: Those that each sequence has been extended by.

        Returns:
            The outputs of all steps together.
        """
        model, share, lane_work = self.colocation.model, self.decode_share, self._in_flight.prefill_work
        for taken_ms in ms if any(ms) else ():  # steps that take no time are not compared
            if predicted_ms := model.step_ms(work, share, lane_work):
                self._slower.append(taken_ms / predicted_ms)
            work = Work.decode(work.seqs, work.context + work.seqs)
        self._step_ms.extend(ms)
        return StepOutput([self._outputs.extended(seq, token_ids) for seq, token_ids in tokens])

    def uncached_tokens(self, request: Request) -> int:
        """Tokens that a prefill of this request would compute now."""
        num_tokens = len(request.token_ids)
        return max(1, num_tokens - self._cache.cached_blocks(request.block_hashes, num_tokens) * BLOCK_SIZE)

    def pending(self, request: Request) -> bool:
        """Whether the first block that the cache lacks is being computed or received right now."""
        found = len(self._pool.find(request.block_hashes))
        return self._cache.pending.last_shared(request.block_hashes, found) is not None

    def reserve(self, request: Request, blocks: int | None = None) -> Reservation | None:
        """Holds the cached prefix and sets pages aside for the rest of the prompt; None: not now, try later.

        Args:
            blocks: Only this many of the first full blocks are going to come; None is also returned where all of them
                are cached.

        Raises:
            ValueError: The request can never be served here.
        """
        self._outputs.check(request)
        hashes = request.block_hashes[:blocks]
        spare = self._scheduler.spare_for_reservation()
        if spare is None or (blocks is not None and len(self._pool.find(hashes)) == blocks):
            return None
        num_blocks = blocks_for(len(request.token_ids)) if blocks is None else blocks
        reservation = self._reservations.reserve(hashes, num_blocks, spare)
        if reservation is not None:
            self._scheduler.reserve_row(reservation.generation, hashes[reservation.first_block :])
            self._executor.settle()  # a copy from or to its pages may be queued still
        return reservation

    def activate(self, reservation: Reservation, request: Request, first: Sequence[Output]) -> list[Output]:
        """All pages of the reservation have arrived: goes on with each choice after its first tokens.

        Args:
            first: Of each choice, as the worker that computed the prompt gave them. Choices that it finished or
                that are missing are dropped.

        Returns:
            The end of choices that can't go on here, without tokens.

        Raises:
            ValueError: The reservation is not live.
        """
        pages = self._reservations.finish(reservation)
        self._scheduler.free_reserved_row(reservation.generation)
        going_on = {output.choice: output.token_ids for output in first if output.finish is None}
        seq = self._outputs.open(request, list(going_on))
        seq.first_token_sent = True
        self._scheduler.start(seq, pages, seq.num_tokens, reservation.first_block)
        self._scheduler.publish(seq)
        ended = []
        for choice, token_ids in tuple(going_on.items()):
            finish = self._outputs.finish_of(request, seq.num_tokens + len(token_ids), token_ids[-1])
            if finish is not None:
                ended.append(Output(request.id, choice, [], [], finish))
                del going_on[choice]
        self._outputs.fork(seq, going_on)
        return ended

    def fill_cache(self, reservation: Reservation, request: Request) -> None:
        """All pages of a reservation for the prompt's first full blocks have arrived: they are in the cache now.

        Raises:
            ValueError: The reservation is not live.
        """
        pages = self._reservations.finish(reservation)
        self._scheduler.free_reserved_row(reservation.generation)
        first = reservation.first_block
        self._scheduler.publish_pages(pages[first:], request.block_hashes[first : len(pages)])
        self._pool.release(pages)

    def cancel(self, reservation: Reservation, *, quarantine: bool) -> None:
        """Gives a reservation up. With `quarantine` its pages stay out of use until `end_quarantine`.

        Raises:
            ValueError: The reservation is not live.
        """
        self._reservations.cancel(reservation, quarantine=quarantine)
        self._scheduler.free_reserved_row(reservation.generation)

    def end_quarantine(self, reservation: Reservation) -> None:
        """No write into the cancelled reservation's pages can come any more: frees them.

        Raises:
            ValueError: The reservation is not in quarantine.
        """
        self._reservations.end_quarantine(reservation)

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps used or cached pages as they are while a transfer reads them."""
        self._pool.hold(pages)
        self._pins.update(pages)

    def pin_cached(self, hashes: Sequence[bytes]) -> list[int]:
        """Pins the pages of the longest cached prefix of a hash chain; none if what runs needs them."""
        pages = self._pool.find(hashes)
        if self._pool.available_beside(pages) < self._scheduler.headroom:
            return []
        self.pin(pages)
        return pages

    def load(self, hashes: Sequence[bytes]) -> None:
        """Loads the first blocks of a chain that only host memory has, if that is quicker than computing them."""
        found = self._pool.find(hashes)
        self._cache.load(hashes, found, len(hashes) * BLOCK_SIZE, self._scheduler.headroom)

    def loading(self, hashes: Sequence[bytes]) -> bool:
        """Whether the first block of a chain that is not in the cache is being loaded from host memory."""
        if self._host is None or not self._host.is_loading:
            return False
        found = len(self._pool.find(hashes))
        return found < len(hashes) and self._host.loads(hashes[found])

    def unpin(self, pages: Sequence[int]) -> None:
        """Takes one pin of each page back.

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

    def stats(self, now: float = 0.0) -> EngineStats:
        """Where the engine stands at the time `now`, as in `step`."""
        scheduler, waiting = self._scheduler, self._scheduler.waiting
        decodes, lacking = scheduler.running_work()
        begin = now + self.colocation.prefill_ms(lacking, decodes) / 1e3
        late_ms = self.colocation.prefill_ms(waiting.late_work(begin), decodes)
        lacking += waiting.queued_work
        prefill_ms = self.colocation.prefill_ms(lacking, decodes)
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=lacking.tokens,
            pages=self._pool.counts(),
            preemptions=scheduler.preemptions,
            prefill_tokens=self._outputs.prefill_tokens,
            decode_tokens=self._outputs.decode_tokens,
            cached_tokens=scheduler.cached_tokens,
            queued_tokens=waiting.limit.tokens,
            decodes=decodes.seqs,
            decode_context=decodes.context,
            prefill_ms=prefill_ms,
            late_ms=passed(prefill_ms, late_ms),
            step_ms=sum(self._step_ms) / len(self._step_ms) if self._step_ms else 0.0,
            slower=median(self._slower) if len(self._slower) >= MIN_STEPS_TO_COMPARE else 0.0,
            host=self._host.stats() if self._host is not None else HostStats(),
            unanswered=self._outputs.unanswered(),
        )

    def take_cache_events(self) -> list[CacheEvent]:
        """Which blocks went into pages, to host memory, or were lost since the last call, in order."""
        return self._pool.take_events()

    def cached_hashes(self, tier: Tier) -> list[bytes]:
        """All blocks that are in this tier now, the effect of events not yet taken included."""
        return self._pool.cached_hashes(tier)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has exactly one owner and all records agree.

        For idle moments and tests: takes about 10 ms for 100,000 pages.
        """
        self._pool.check_integrity()
        self._scheduler.check_integrity(self._reservations.num_live)
        self._reservations.check_integrity()
        held = self._scheduler.held_pages() + self._reservations.held_pages() + self._outputs.shown_pages
        held += self._in_flight.held_pages()
        held += self._pins.elements()
        if self._host is not None:
            self._host.check_integrity()
            held += self._host.held_pages()
        holders = np.bincount(np.array(held, dtype=np.int64), minlength=self._pool.num_pages)
        if (holders != self._pool.refcounts()).any():
            wrong = int(np.flatnonzero(holders != self._pool.refcounts())[0])
            raise AssertionError(f"page {wrong} has {holders[wrong]} known holders, not as many as the pool counts")
        if {id(seq) for seq in self._outputs.seqs()} != {id(seq) for seq in self._scheduler.seqs()}:
            raise AssertionError("requests have other sequences than the scheduler")

    @property
    def _to_collect(self) -> bool:
        """Whether there is something that the next step collects or takes back, whatever else it does."""
        loaded = self._host is not None and self._host.done
        return bool(self._in_flight.main or self._in_flight.prefill_done or loaded or self._outputs.shown_pages)

    def _release_shown(self) -> None:
        """The caller has had the chance to pin the pages of finished prefill-only requests."""
        if self._outputs.shown_pages:
            self._pool.release(self._outputs.shown_pages)
            self._outputs.shown_pages = []

    def _schedule(self, now: float) -> Plan:
        """Decides what is computed next; what goes to the prefill lane is launched there."""
        plan = self._scheduler.schedule_decodes()
        if self._scheduler.wants_prefill(now):
            busy = self._in_flight.split
            budget, shares = self.colocation.prefill_budget(plan.work, busy.shares if busy else None)
            lane_plan = self._scheduler.schedule_prefills(plan, budget, now)
            if lane_plan:
                assert shares is not None
                self._in_flight.launch_prefill(self._splits[shares], lane_plan, self._on_work)
                self._scheduler.lane_launched(lane_plan)
                self._launch_next_chunk()
        return plan

    def _launch(self, plan: Plan) -> None:
        """Starts a step on the full lane, or on the decode lane of the split in use."""
        work = plan.work
        predicted_ms = self.colocation.model.step_ms(work, self.decode_share, self._in_flight.prefill_work)
        self._in_flight.launch(plan, work, predicted_ms)

    def _launch_overlapped(self, now: float) -> None:
        """Launches the step after the one in flight, as far as that is known before its tokens are."""
        (step,) = self._in_flight.main
        if step.lane.overlaps and step.lane is self._in_flight.main_lane and not self._in_flight.prefill_done:
            plan = lookahead.overlapped_decodes(self._scheduler, step.plan, now)
            if plan:
                self._launch(plan)

    def _launch_next_chunk(self) -> None:
        """Queues the next chunk of the prompt on the prefill lane, unless the decodes would have another split."""
        split = self._in_flight.split
        if split is None:
            return
        budget, shares = self.colocation.prefill_budget(self._scheduler.running_work()[0], None)
        if shares == split.shares:
            plan = lookahead.next_lane_chunk(self._scheduler, self._in_flight.prefill[-1].plan, budget)
            if plan:
                self._in_flight.launch_prefill(split, plan, self._on_work)
                self._scheduler.lane_launched(plan)

    def _process(self, step: InFlightStep, result: StepResult, output: StepOutput) -> None:
        """Makes outputs of what a collected step has sampled, and records it."""
        if step.name == "prefill":
            self._scheduler.lane_collected(step.plan)
        elif step.predicted_ms:
            self._slower.append(result.ms / step.predicted_ms)
        self._outputs.process(step.plan, result.sampled, output)
        if step.plan.decodes and step.name != "prefill":
            self._step_ms.append(result.ms)
        self.trace.add(step, result, self._scheduler.num_waiting, self._scheduler.waiting.limit.tokens)

    def _idle(self, output: StepOutput, now: float) -> None:
        """Nothing can be computed. Waits if pages may still become available, else fails the request that is stuck."""
        self._idle_at = self._scheduler.version
        seq = self._scheduler.stuck(now)
        loading = self._host is not None and self._host.is_loading
        if seq is None or self._in_flight.prefill or self._reservations.num_live or self._pins or loading:
            return
        self._outputs.end_choices(seq.request.id)
        output.failed.append(
            (
                seq.request.id,
                f"it needs {blocks_for(seq.num_tokens)} KV pages, and of {self._pool.num_pages} there are "
                f"{self._pool.counts().quarantined} in quarantine after broken transfers",
            )
        )

"""The engine: requests in, tokens out, one step at a time.

    add ──▶ admission ──▶ scheduler ──plan──▶ build_batch ──▶ lane.launch … collect ──▶ tokens, blocks, outputs

A step's batch runs on the whole device, or on the decode lane while the prefill lane computes something else
(`engine/aside.py`); what goes where is `cpd/colocation.py`'s to say.

A lane that works by itself has the next step before the last one's tokens are processed (`engine/flight.py`).

Runs on one thread and never reads a clock. Whatever is called between two steps sees a consistent state: pages are
released and blocks published only when the step that touches them has been collected.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from cpd.blocks import BLOCK_SIZE, Tier, blocks_for
from cpd.colocation import Colocation
from cpd.perfmodel import Work
from engine.admission import Admission
from engine.aside import Aside
from engine.backlog import Backlog
from engine.batch import Lane, Ran, Runner
from engine.fair_queue import passed
from engine.flight import Flight
from engine.host_tier import HostMemory, HostTier
from engine.live import LiveSequences
from engine.plan import BuildBatch, Plan, build_batch
from engine.pool import BlockPool
from engine.quiet import Choose, QuietRun
from engine.requests import LiveRequests
from engine.reservations import Reservations
from engine.scheduler import Scheduler
from engine.trace import LaneName, StepTrace
from engine.types import CacheEvent, EngineStats, HostStats, Output, Request, Reservation, StepOutput

RECENT_STEPS = 32
"""Whose times the load report tells."""

STEPS_TO_TELL = 8
"""At least so many, to tell how much slower than predicted they are."""


class Engine:
    """One model's scheduler, paged cache and step loop.

    Args:
        runner: Runs the batches.
        max_model_len: Tokens of the longest sequence. The pool's size may limit it further.
        colocation: Where prefills go while there are decodes.
        max_num_seqs: Sequences that run at the same time, at most.
        max_queue_tokens: Tokens of requests that wait for their first turn, at most.
        build: Makes the batches; a runner that computes nothing needs less in them.
        host: Where evicted blocks are kept; None: nowhere.

    Attributes:
        max_model_len: Tokens of the longest sequence that can be served.
        max_num_seqs: Sequences that run at the same time, at most.
        colocation: As given; it never changes.
        host_pages: Evicted blocks that are kept at most.
        host_page_ms: How long it takes to copy one of them back.
        trace: Of the last steps.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_model_len: int,
        colocation: Colocation,
        max_num_seqs: int,
        max_queue_tokens: int,
        build: BuildBatch = build_batch,
        host: HostMemory | None = None,
    ) -> None:
        self.max_model_len = min(max_model_len, runner.num_pages * BLOCK_SIZE)
        self.max_num_seqs = min(max_num_seqs, colocation.max_tokens)  # so that each advances in each step
        self._runner = runner
        self._max_queue_tokens = max_queue_tokens
        self.host_pages = host.num_slots if host is not None else 0
        self.host_page_ms = host.slot_ms if host is not None else 0.0
        self._pool = BlockPool(runner.num_pages)
        self._host = HostTier(self._pool, host, lambda work: colocation.prefill_ms(work, Work())) if host else None
        self._live = LiveSequences(
            self._pool,
            max_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            copy_page=runner.copy_page,
            backlog=Backlog(lambda tokens: colocation.prefill_ms(Work.prefill(tokens), Work()) / 1000),
        )
        self._admission = Admission(
            self._live, step_ms=colocation.model.step_ms, host=self._host, on_returned=lambda: self._on_work()
        )
        self._scheduler = Scheduler(self._live, self._admission)
        self.colocation = colocation
        self._splits = {split.shares: split for split in runner.splits}
        self._build = build
        self._aside = Aside(self._pool, self._live.table, build)
        self._on_work: Callable[[], None] = lambda: None
        self._reservations = Reservations(self._live)
        self._requests = LiveRequests(self._live, self.max_model_len, self._release)
        self._flight: Flight | None = None
        self.trace = StepTrace()
        self._pins: Counter[int] = Counter()
        self._step_ms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._slower: deque[float] = deque(maxlen=RECENT_STEPS)
        self._stalled = False

    def add(self, request: Request) -> None:
        """Puts a request in the waiting queue.

        Raises:
            QueueFullError: The queue holds its `max_queue_tokens` (`engine.backlog` has the rule).
            ValueError: The request can never be served here.
        """
        self._requests.check(request)
        self._live.backlog.check(request.tenant, len(request.token_ids), self._max_queue_tokens, request.received)
        self._look_again()
        choices = list(range(request.first_choice, request.first_choice + request.n))
        self._admission.add(self._requests.open(request, choices))

    def abort(self, request_id: str, choices: Sequence[int] | None = None) -> None:
        """Ends these choices of a request (None: all) in whatever state they are. Unknown ones are ignored.

        A reservation for the request is the caller's to cancel.
        """
        self._look_again()
        self._requests.end_choices(request_id, choices)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something.

        False also when everything waits for pages that others hold (reservations, pins), for the prefill lane, or for
        blocks from host memory: ask again after the next call that changes the engine, and when `on_work` calls.
        """
        return self._to_collect or (bool(self._requests) and not self._stalled)

    @property
    def aside(self) -> int:
        """The number of the chunk that the prefill lane has to end next; 0: it has none. Any thread may ask."""
        return self._aside.under_way

    def on_work(self, callback: Callable[[], None]) -> None:
        """Has `callback` called, on any thread, whenever the prefill lane or the host tier is done with something."""
        self._on_work = callback

    def step(self, now: float = 0.0) -> StepOutput:
        """Collects one batch, and sees to the prefill lane. Pin the pages of `computed` before the next call.

        Args:
            now: The time of the requests' `received` and `deadline`, in seconds.
        """
        if self._requests.shown:
            self._look_again()
            self._requests.release_shown()
        if self._host is not None and self._host.done:
            self._look_again()
            self._admission.take_returned()
        output = StepOutput()
        if self._flight is None:
            self._start(output, now)
        if (flight := self._flight) is not None:
            self._flight = self._follow(flight, now)
            ran = flight.lane.collect()
            self._pool.release(flight.freed)
            if flight.predicted_ms:
                self._slower.append(ran.ms / flight.predicted_ms)
            self._requests.process(flight.plan, ran.sampled, output)
            self._record(flight.name, flight.lane, flight.plan, flight.work, ran)
        # Last, because the pages of `computed` must be as they are when the caller sees them.
        while self._aside.done:
            self._look_again()
            aside, ran = self._aside.collect()
            self._requests.process(aside.plan, ran.sampled, output)
            self._record("prefill", aside.split.prefill, aside.plan, aside.work, ran)
            self._launch_ahead()
        return output

    @property
    def quiet_steps(self) -> int:
        """So many steps from now on each bring no more than the next token of every sequence that is not aside.

        A simulator, which knows that none of them is a stop token, may make them at once, if nothing comes from outside
        meanwhile, and the prefill lane is not done before the last one ends.
        """
        return 0 if self._to_collect else self._scheduler.quiet_steps

    @property
    def decoding(self) -> Work:
        """What the first of the `quiet_steps` computes."""
        seqs = self._live.decoding
        return Work.decode(len(seqs), sum([seq.num_tokens for seq in seqs]))

    @property
    def decode_share(self) -> float:
        """Of the device, that decodes have now."""
        return self._lane.share

    def quiet_run(self, steps: int, choose: Choose) -> QuietRun:
        """Begins some of the `quiet_steps`; `fast_forward` makes them, before anything else is done.

        Args:
            steps: So many at most.
            choose: Says which tokens come out.
        """
        return QuietRun(self._live, steps, choose)

    def fast_forward(self, ms: Sequence[float], run: QuietRun) -> StepOutput:
        """Makes the first steps of a quiet run, with the effect that one after the other has, and ends it.

        Args:
            ms: How long each of them takes.

        Returns:
            The tokens of each sequence, of all steps together.
        """
        model, share, aside = self.colocation.model, self.decode_share, self._aside.work
        work = run.work
        for taken_ms in ms if any(ms) else ():  # steps that take no time are not compared
            if predicted_ms := model.step_ms(work, share, aside):
                self._slower.append(taken_ms / predicted_ms)
            work = Work.decode(work.seqs, work.context + work.seqs)
        self._step_ms.extend(ms)
        run.end(len(ms))
        self._requests.decode_tokens += len(ms) * len(run.seqs)
        output = StepOutput()
        for seq, chosen in zip(run.seqs, run.chosen, strict=True):
            finish = self._requests.finish_of(seq.request, seq.num_tokens, chosen[-1])
            output.outputs.append(Output(seq.request.id, seq.choices[0], chosen, [], finish))
            if finish is not None:
                self._requests.branch(seq, {})
        return output

    def uncached_tokens(self, request: Request) -> int:
        """Tokens that a prefill of this request would compute now."""
        num_tokens = len(request.token_ids)
        return max(1, num_tokens - self._admission.cached_blocks(request.block_hashes, num_tokens) * BLOCK_SIZE)

    def pending(self, request: Request) -> bool:
        """Whether the first block that the cache lacks is being computed or received right now."""
        found = len(self._pool.find(request.block_hashes))
        return self._live.pending.last_shared(request.block_hashes, found) is not None

    def reserve(self, request: Request, blocks: int | None = None) -> Reservation | None:
        """Holds the cached prefix and sets pages aside for the rest of the prompt; None: not now, try later.

        Args:
            blocks: Only the first so many full blocks are going to come; None also where all of them are cached.

        Raises:
            ValueError: The request can never be served here.
        """
        self._requests.check(request)
        reservation = self._reservations.reserve(request, blocks)
        if reservation is not None:
            self._runner.settle()  # a copy from or to its pages may be queued still
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
        self._look_again()
        going_on = {output.choice: output.token_ids for output in first if output.finish is None}
        seq = self._requests.open(request, list(going_on))
        seq.reported = True
        self._live.start(seq, pages, seq.num_tokens, reservation.first_block)
        self._live.publish(seq)
        ended = []
        for choice, token_ids in tuple(going_on.items()):
            finish = self._requests.finish_of(request, seq.num_tokens + len(token_ids), token_ids[-1])
            if finish is not None:
                ended.append(Output(request.id, choice, [], [], finish))
                del going_on[choice]
        self._requests.branch(seq, going_on)
        return ended

    def fill_cache(self, reservation: Reservation, request: Request) -> None:
        """All pages of a reservation for the prompt's first full blocks have arrived: they are in the cache now.

        Raises:
            ValueError: The reservation is not live.
        """
        pages = self._reservations.finish(reservation)
        self._look_again()
        self._live.publish_pages(pages, request.block_hashes, reservation.first_block)
        self._pool.release(pages)

    def cancel(self, reservation: Reservation, *, quarantine: bool) -> None:
        """Gives a reservation up. With `quarantine` its pages stay out of use until `end_quarantine`.

        Raises:
            ValueError: The reservation is not live.
        """
        self._look_again()
        self._reservations.cancel(reservation, quarantine=quarantine)

    def end_quarantine(self, reservation: Reservation) -> None:
        """No write into the cancelled reservation's pages can come any more: frees them.

        Raises:
            ValueError: The reservation is not in quarantine.
        """
        self._look_again()
        self._reservations.end_quarantine(reservation)

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps used or cached pages as they are while a transfer reads them."""
        self._pool.hold(pages)
        self._pins.update(pages)

    def pin_cached(self, hashes: Sequence[bytes]) -> list[int]:
        """Pins the pages of the longest prefix of a hash chain that is in the cache; none if what runs needs them."""
        pages = self._pool.find(hashes)
        self.pin(pages)
        if self._pool.available < self._live.headroom:
            self.unpin(pages)
            return []
        return pages

    def bring_back(self, hashes: Sequence[bytes]) -> None:
        """Has the first blocks of a chain come back from host memory, those that only it has, if that is worth it."""
        if self._host is not None:
            self._admission.bring_back(hashes, self._pool.find(hashes), len(hashes) * BLOCK_SIZE)

    def returning(self, hashes: Sequence[bytes]) -> bool:
        """Whether the first block of a chain that is not in the cache is on its way back from host memory."""
        if self._host is None or not self._host.under_way:
            return False
        found = len(self._pool.find(hashes))
        return found < len(hashes) and self._host.returning(hashes[found])

    def unpin(self, pages: Sequence[int]) -> None:
        """Takes one pin of each page back.

        Raises:
            ValueError: A page is not pinned.
        """
        pins, gone = self._pins, Counter(pages)
        left = [pins[page] - count for page, count in gone.items()]
        if min(left, default=0) < 0:
            raise ValueError(f"not all of the pages {list(pages)} are pinned")
        self._look_again()
        for page, count in zip(gone, left, strict=True):
            if count:
                pins[page] = count
            else:
                pins.pop(page)  # a Counter's own `del` is slow
        self._pool.release(pages)

    def stats(self, now: float = 0.0) -> EngineStats:
        """Where the engine stands at the time `now`, as in `step`."""
        live = self._live
        decodes, lacking = live.running_work()
        begin = now + self.colocation.prefill_ms(lacking, decodes) / 1e3
        late_ms = self.colocation.prefill_ms(live.line.late_work(begin), decodes)
        lacking += live.queued_work
        prefill_ms = self.colocation.prefill_ms(lacking, decodes)
        return EngineStats(
            running=len(live.running),
            waiting=live.num_waiting,
            waiting_tokens=lacking.tokens,
            pages=self._pool.counts(),
            preemptions=live.preemptions,
            prefill_tokens=self._requests.prefill_tokens,
            decode_tokens=self._requests.decode_tokens,
            cached_tokens=self._admission.cached_tokens,
            queued_tokens=live.backlog.tokens,
            decodes=decodes.seqs,
            decode_context=decodes.context,
            prefill_ms=prefill_ms,
            late_ms=passed(prefill_ms, late_ms),
            step_ms=sum(self._step_ms) / len(self._step_ms) if self._step_ms else 0.0,
            slower=median(self._slower) if len(self._slower) >= STEPS_TO_TELL else 0.0,
            host=self._host.stats() if self._host is not None else HostStats(),
            unanswered=self._requests.unanswered(),
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
        self._live.check_integrity()
        self._reservations.check_integrity()
        held = self._live.held_pages() + self._reservations.held_pages() + self._requests.shown
        held += self._aside.held_pages()
        held += self._flight.freed if self._flight else []
        held += self._pins.elements()
        if self._host is not None:
            self._host.check_integrity()
            held += self._host.held_pages()
        holders = np.bincount(np.array(held, dtype=np.int64), minlength=self._pool.num_pages)
        if (holders != self._pool.refcounts()).any():
            wrong = int(np.flatnonzero(holders != self._pool.refcounts())[0])
            raise AssertionError(f"page {wrong} has {holders[wrong]} known holders, not as many as the pool counts")
        if {id(seq) for seq in self._requests.seqs()} != {id(seq) for seq in self._live.seqs()}:
            raise AssertionError("the live requests have other sequences than those that are live")

    def _look_again(self) -> None:
        """Somebody may go on or start who could not."""
        self._stalled = False
        self._scheduler.look_again()

    @property
    def _to_collect(self) -> bool:
        """Whether there is something that the next step collects or takes back, whatever else it does."""
        returned = self._host is not None and self._host.done
        return self._flight is not None or self._aside.done or returned or bool(self._requests.shown)

    def _start(self, output: StepOutput, now: float) -> None:
        """Decides what is computed next, and launches it."""
        plan = self._scheduler.decodes()
        if self._scheduler.wants_prefill(now):
            self._prefill(plan, now)
        if plan:
            self._flight = self._launch(plan)
        elif self._aside.split is None:
            self._without_plan(output, now)
        else:
            self._stalled = True

    def _follow(self, flight: Flight, now: float) -> Flight | None:
        """Launches what comes after a step, as far as that is known before its tokens are."""
        if not flight.lane.queues or flight.lane is not self._lane or self._aside.done:
            return None
        plan = self._scheduler.decodes_after(flight.plan, now)
        return self._launch(plan) if plan else None

    @property
    def _lane(self) -> Lane:
        """For whatever does not go aside."""
        split = self._aside.split
        return split.decode if split else self._runner.full

    def _launch(self, plan: Plan) -> Flight:
        lane, aside, work = self._lane, self._aside, plan.work
        batch = self._build(plan, self._live.table)
        predicted_ms = self.colocation.model.step_ms(work, lane.share, aside.work)
        lane.launch(batch)
        return Flight(lane, "decode" if aside.split else "full", plan, work, predicted_ms)

    def _release(self, pages: list[int]) -> None:
        """Nobody holds these pages any more, but a step that is on its way may use them."""
        self._look_again()
        if self._flight is not None:
            self._flight.freed.extend(pages)
        else:
            self._pool.release(pages)

    def _prefill(self, plan: Plan, now: float) -> None:
        """Adds prefills to the step, and starts the prefill lane if it is its turn."""
        decodes = Work.decode(len(plan.singles), sum(chunk.start + 1 for chunk in plan.singles))
        busy = self._aside.split
        room, shares = self.colocation.room(decodes, busy.shares if busy else None)
        aside = self._scheduler.prefills(plan, room, now)
        if aside:
            assert shares is not None
            self._aside.launch(self._splits[shares], aside, self._on_work)
            self._launch_ahead()

    def _launch_ahead(self) -> None:
        """Queues the next chunk of the prompt on the prefill lane, unless the decodes would have another split."""
        last = self._aside.last
        if last is None:
            return
        room, shares = self.colocation.room(self._live.running_work()[0], None)
        if shares == last.split.shares and (plan := self._scheduler.prefill_after(last.plan, room)):
            self._aside.launch(last.split, plan, self._on_work)

    def _record(self, name: LaneName, lane: Lane, plan: Plan, work: Work, ran: Ran) -> None:
        if plan.singles and name != "prefill":
            self._step_ms.append(ran.ms)
        waiting, tokens = self._live.num_waiting, self._live.backlog.tokens
        self.trace.add(name, lane.share, plan, work, ran, waiting, tokens)

    def _without_plan(self, output: StepOutput, now: float) -> None:
        """Nothing can be computed. Waits if somebody may give pages back, else fails the first in line."""
        seq = self._scheduler.first_in_line(now)
        returning = self._host is not None and self._host.under_way
        if seq is None or self._reservations.any_live or self._pins or returning:
            self._stalled = True
            return
        self._requests.end_choices(seq.request.id, None)
        output.failed.append(
            (
                seq.request.id,
                f"it needs {blocks_for(seq.num_tokens)} KV pages, and of {self._pool.num_pages} there are "
                f"{self._pool.counts().quarantined} in quarantine after broken transfers",
            )
        )

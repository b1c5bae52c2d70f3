"""The scheduler: owns all sequences (`engine/scheduling/sequence.py`) and decides which tokens a step computes.

    schedule_decodes, schedule_prefills ──▶ plans ──launched, collected──▶ commit, append, fork, finish ──▶ …

There are no phases: every sequence has `num_computed` tokens and catches up with `num_tokens`. Running sequences go
before waiting ones, sequences with one token to compute before those with more, older ones before newer ones.
`cpd/performance/colocation.py` decides how many prefill tokens a step may have, and on which lane.

A waiting sequence starts when there are a free row of the sequence table, pages for all its tokens, and one more page
for each running sequence and landing (`engine/landings.py`) to grow. While its next block is being computed, received
or loaded, it waits for that prefix. If pages run out all the same, the newest running sequence is preempted: its pages
go to the cache, and it is the first to be scheduled again. Where all layers have sliding windows, pages behind them go
to the cache while their sequence runs.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from operator import attrgetter

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for, extend_hashes
from cpd.performance.colocation import PrefillBudget
from cpd.performance.model import Work
from engine.scheduling.admission import Admission, AdmissionLimits, Fits, WaitsForPrefix
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.plan import MAX_DECODE_TOKENS, Chunk, Plan
from engine.scheduling.queue_limit import QueueLimit
from engine.scheduling.sequence import Sequence, SequenceState, SequenceTable
from engine.scheduling.waiting_queue import MayStart, WaitingQueue

_READ_AT_ONCE = 64
"""Kernels read the context in groups of this many tokens, also those of a group that are before a window."""


class Scheduler:
    """Owns the sequences and their pages.

    Args:
        cache: The KV cache, which allocates pages.
        max_len: Maximum tokens of a sequence.
        max_num_seqs: Maximum number of running sequences, at most `max_tokens`.
        max_tokens: Maximum tokens of a step.
        limit: The limit of the waiting queue.
        prefill_ms: Predicts how long a prompt takes beside decodes.
        window: The last tokens, itself included, that a token attends to in any layer; 0 for all.

    Attributes:
        cache, pool: The KV cache and its pages.
        table: Tokens and pages of the running sequences.
        running: Running sequences, oldest first.
        waiting: The waiting queue.
        preemptions: Number of preemptions so far.
        cached_tokens: Number of prompt tokens found in the cache so far.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_len: int,
        max_num_seqs: int,
        max_tokens: int,
        limit: QueueLimit | None = None,
        prefill_ms: Callable[[Work, Work], float] = lambda work, decodes: 0.0,
        window: int = 0,
    ) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.table = SequenceTable(max_num_seqs, max_len)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(limit)
        self._admission = Admission(self.waiting, cache)
        self.preemptions = 0
        self.cached_tokens = 0
        self._max_tokens = max_tokens
        self._prefill_ms = prefill_ms
        self._window = window
        self._reserved_rows = 0
        self._prefilling: list[Sequence] = []  # running ones that `schedule_decodes` left to `schedule_prefills`
        self._changes = 0
        self._exhausted_at = -1  # the version at which no other sequence could start

    @property
    def version(self) -> int:
        """Changes whenever a sequence may start or go on, or a landing be reserved, that could not before."""
        return self._changes + self.pool.releases

    @property
    def headroom(self) -> int:
        """Number of pages that must stay available: one for each running sequence and landing to grow."""
        return len(self.running) + self._reserved_rows

    @property
    def num_waiting(self) -> int:
        """Number of sequences that do not run."""
        return self.cache.pending.num_waiting + len(self.waiting)

    @property
    def num_started(self) -> int:
        """Number of sequences that run, or did so before."""
        waiting = (*self.waiting.resumable, *self.cache.pending.waiting())
        return len(self.running) + sum(not seq.queued for seq in waiting)

    @property
    def on_main_lane(self) -> list[Sequence]:
        """The running sequences that are not on the prefill lane."""
        return [seq for seq in self.running if not seq.lane_chunks]

    # ---- whether sequences may start ----

    def hold(self, may_start: MayStart) -> None:
        """Lets only these waiting sequences start, until `go_on`. With NONE, no landing is reserved either."""
        self.waiting.may_start = may_start
        self.waiting.limit.hold()
        self._changes += 1

    def go_on(self, now: float) -> None:
        """Lets all waiting sequences start again."""
        self.waiting.may_start = MayStart.ALL
        self.waiting.limit.go_on(now)
        self._changes += 1

    def park(self) -> list[int]:
        """Preempts every running sequence that is not on the prefill lane.

        Returns:
            The pages of the blocks with which resumable sequences will go on, of one sequence after the other.
        """
        for seq in self.on_main_lane:
            self._preempt(seq)
        for seq in self.waiting.resumable:
            seq.parked = seq.parked or not seq.queued
        return [page for seq in self.waiting.resumable for page in self.pool.find(seq.hashes)]

    # ---- which tokens a step computes ----

    def schedule_decodes(self) -> Plan:
        """Begins a step with the running sequences that decode, preempting others if pages run out.

        These have one token to compute, or a few, if a grammar forced some. Notes the other running sequences in
        `_prefilling`, for the next `schedule_prefills`.
        """
        decodes: list[Chunk] = []
        forced: list[Chunk] = []
        prefilling: list[Sequence] = []
        running = SequenceState.RUNNING
        room = self._max_tokens - len(self.running)  # for tokens that grammars forced
        for seq in tuple(self.running):
            if seq.state is not running or seq.lane_chunks:  # just preempted, or on the prefill lane
                continue
            known, computed = seq.num_tokens, seq.num_computed
            if seq.num_pages * BLOCK_SIZE < known and not self._grow(seq):
                continue
            count = known - computed
            if count == 1:
                decodes.append(Chunk(seq, computed, 1, 1, seq.choices))
            elif _decodes(seq) and count - 1 <= room:
                forced.append(Chunk(seq, computed, count, 1, seq.choices))
                room -= count - 1
            else:
                prefilling.append(seq)
        self._prefilling = prefilling
        return Plan(decodes, forced)

    def wants_prefill(self, now: float = 0.0) -> bool:
        """True if `schedule_prefills` may find something to do."""
        return bool(self._prefilling) or self._next_waiting(now) is not None

    def schedule_prefills(self, step: Plan, budget: PrefillBudget, now: float = 0.0) -> Plan:
        """Adds prefills to the step that `schedule_decodes` began, within the budget, starting waiting sequences.

        Args:
            now: The current time, on which the order of the waiting queue depends.

        Returns:
            The plan for the prefill lane.
        """
        self._exhausted_at = -1
        lane = Plan()
        # Once the lane has a chunk, the batch has the lower limit; once the batch exceeds that, the lane gets none.
        limit, lane_left = budget.mixed, budget.lane_chunk
        while lane_left or limit.fits(step.work, Work.prefill(1)):
            fits = _always if lane_left or budget.chunked else partial(limit.fits, step.work)
            seq = self._next_prefilling(fits) or self._start_next(fits, now)
            if seq is None:
                self._exhausted_at = self.version
                break
            computed, count = seq.num_computed, seq.num_tokens - seq.num_computed
            if budget.chunked:
                count = limit.chunk(step.work, count, computed)
                if not count:  # it attends to too many tokens: the next step has room for it
                    break
            if budget.chunked or limit.fits(step.work, Work.prefill(count, computed)):
                step.add(seq, computed, count)
                if lane_left and not budget.mixed_with_lane.allows(step.work):
                    lane_left = 0
            else:
                count = min(count, lane_left)
                lane.add(seq, computed, count)
                limit, lane_left = budget.mixed_with_lane, lane_left - count
        return lane

    def may_start(self, now: float = 0.0) -> bool:
        """True if a waiting sequence may start, unless the last `schedule_prefills` found that none can."""
        return self._exhausted_at != self.version and self._next_waiting(now) is not None

    def stuck(self, now: float = 0.0) -> Sequence | None:
        """The sequence that can't go on or start, if the plan is empty."""
        return self.running[0] if self.running else self.waiting.first(now)

    # ---- the life of a sequence ----

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence in the waiting queue."""
        cached = min(self.cache.cached_blocks(seq.hashes, seq.num_tokens) * BLOCK_SIZE, seq.num_tokens - 1)
        work = Work.prefill(seq.num_tokens - cached, cached)
        decodes = self.running_work()[0] if self.waiting else Work()  # its time matters only beside other prompts
        self.waiting.add(seq, work, self._prefill_ms(work, decodes) / 1e3)
        self._changes += 1

    def resume(self, seq: Sequence) -> None:
        """Puts a sequence that ran before, as another one, in the waiting queue."""
        self._make_resumable([seq])

    def start(self, seq: Sequence, pages: list[int], num_computed: int, num_published: int) -> None:
        """Starts a sequence in pages that it holds, where its first tokens are computed and blocks published."""
        self.table.enter(seq, pages)
        seq.num_computed, seq.num_published = num_computed, num_published
        seq.state = SequenceState.RUNNING
        insort(self.running, seq, key=attrgetter("order"))
        self._changes += 1  # a landing may fit now

    def lane_launched(self, plan: Plan) -> None:
        """Notes that the prefill lane computes a plan. Its sequences can't be in another step, or be preempted."""
        for chunk in plan.chunks:
            chunk.seq.lane_chunks += 1

    def lane_collected(self, plan: Plan) -> None:
        """Notes that the prefill lane has computed a plan. Its sequences may go on elsewhere."""
        for chunk in plan.chunks:
            chunk.seq.lane_chunks -= 1
        self._changes += 1

    def commit(self, chunk: Chunk, num_accepted: int) -> None:
        """Commits a computed chunk and its first `num_accepted` sampled tokens, and publishes complete blocks.

        A chunk that verifies draft tokens samples after each; tokens after a rejected draft don't count as computed.
        Without drafts all samples are accepted.
        """
        seq = chunk.seq
        seq.num_computed = chunk.start + chunk.num_tokens - chunk.num_samples + num_accepted
        if seq.num_computed >= (seq.num_published + 1) * BLOCK_SIZE:
            self.publish(seq)
            if self._window and not seq.request.prefill_only:  # the pages of those are sent
                self._release_behind_window(seq)

    def publish(self, seq: Sequence) -> None:
        """Publishes the computed full blocks of a running sequence."""
        known, first, last = len(seq.hashes), seq.num_published, seq.num_computed // BLOCK_SIZE
        if known < last:
            tokens = self.table.tokens[seq.row, known * BLOCK_SIZE : last * BLOCK_SIZE]
            seq.hashes += extend_hashes(seq.hashes[-1] if known else seq.request.hash_root, tokens)
        self.publish_pages(self.table.pages[seq.row, first:last].tolist(), seq.hashes[first:last])
        seq.num_published = last

    def _release_behind_window(self, seq: Sequence) -> None:
        """Releases the pages that no later token attends to. They stay in the cache until they are evicted."""
        blocks = (seq.num_computed + 1 - self._window) // _READ_AT_ONCE * _READ_AT_ONCE // BLOCK_SIZE
        if blocks > seq.num_released:
            self.pool.release(self.table.take_first(seq, blocks))

    def publish_pages(self, pages: list[int], hashes: list[bytes]) -> None:
        """Publishes full blocks in pages that the caller holds."""
        self._make_resumable(self.cache.publish(pages, hashes))

    def append(self, seq: Sequence, token_ids: list[int]) -> None:
        """Appends tokens to a running sequence, to be computed next."""
        row = self.table.rows[seq.row]
        for token_id in token_ids:
            row[seq.num_tokens] = token_id
            seq.num_tokens += 1

    def add_page_to_each(self, seqs: list[Sequence]) -> bool:
        """Gives each of these running sequences one more page. Returns False, and gives none, if there are too few."""
        pages = self.pool.take(len(seqs))
        for seq, page in zip(seqs, pages or (), strict=pages is not None):
            self.table.add_pages(seq, [page])
        return pages is not None

    def fork(self, seq: Sequence, choice: int, token_ids: list[int]) -> Sequence:
        """Makes a sequence of its own for a choice of the running `seq`, whose tokens are all computed.

        The two share the full pages; the partial last one is copied. Without a free page or row the new sequence
        waits as if preempted.

        Args:
            token_ids: The choice's next tokens.
        """
        shared = self.table.pages_of(seq)
        partial = shared.pop() if seq.num_tokens % BLOCK_SIZE else None
        child = Sequence(
            request=seq.request,
            choices=[choice],
            order=(seq.order[0], choice),
            hashes=seq.hashes[: seq.num_published],
            tokens=np.append(self.table.tokens_of(seq), np.array(token_ids, dtype=np.int32)),
            num_tokens=seq.num_tokens + len(token_ids),
            first_token_sent=True,
            num_released=seq.num_released,
        )
        own = self.pool.take(0 if partial is None else 1) if self._free_rows > 0 else None
        if own is None:
            child.num_released = 0
            self._make_resumable([child])
            return child
        self.pool.hold(shared)
        if partial is not None:
            self.cache.copy_page(partial, own[0])
        self.start(child, shared + own, seq.num_computed, seq.num_published)
        return child

    def finish(self, seq: Sequence) -> list[int]:
        """Ends a sequence, whatever its state. Returns its pages, which the caller must release."""
        pages: list[int] = []
        if seq.state is SequenceState.RUNNING:
            pages = self._stop(seq)
        elif seq.state is SequenceState.WAITING_FOR_PREFIX:
            self.cache.pending.stop_waiting(seq)
        else:
            self.waiting.remove(seq)
        if seq.queued:
            self.waiting.give_up(seq)
        seq.state = SequenceState.FINISHED
        self._changes += 1
        return pages

    def take_loaded(self) -> None:
        """Publishes blocks that have been loaded from host memory."""
        self._make_resumable(self.cache.take_loaded())

    # ---- landing reservations ----

    def spare_for_reservation(self) -> int | None:
        """Number of pages that a landing must leave available; None if there may be no landing now.

        Waiting sequences may need rows or pages first, or nothing may start.

        These are the headroom, and the pages for resumable sequences: some wait only until the prefill lane is free.
        """
        resumable = self.waiting.resumable
        if self.waiting.may_start is MayStart.NONE:
            return None
        if self._free_rows <= len(resumable) or not self.waiting.may_be_overtaken:
            return None
        return self.headroom + sum(blocks_for(seq.num_tokens) + 1 for seq in resumable)

    def reserve_row(self, producer: Hashable, hashes: list[bytes]) -> None:
        """Keeps a row free for a landing, and claims the blocks that it will publish."""
        self.cache.claim(producer, hashes)
        self._reserved_rows += 1
        self.waiting.landing_overtook_first()

    def free_reserved_row(self, producer: Hashable) -> None:
        """Frees the row of a landing that has ended, and wakes the sequences that wait for its blocks."""
        self._reserved_rows -= 1
        self._changes += 1
        self._make_resumable(self.cache.pending.give_up(producer))

    # ---- figures ----

    def running_work(self) -> tuple[Work, Work]:
        """The work of the scheduled sequences: their decodes, and their remaining prefills."""
        num_decodes = context = 0
        remaining = Work()
        for seq in self.running:
            if _decodes(seq):
                num_decodes += 1
                context += seq.num_tokens
            else:
                remaining += Work.prefill(seq.num_tokens - seq.num_computed, seq.num_computed)
        for seq in (*self.waiting.resumable, *self.cache.pending.waiting()):
            if not seq.queued:
                remaining += Work.prefill(seq.num_tokens)
        return Work.decode(num_decodes, context), remaining

    def seqs(self) -> list[Sequence]:
        """All sequences, whatever their state."""
        return [*self.running, *self.cache.pending.waiting(), *self.waiting]

    def held_pages(self) -> list[int]:
        """The pages of all running sequences, each as often as it is held."""
        return [page for seq in self.running for page in self.table.pages_of(seq)]

    def check_integrity(self, num_reservations: int = 0) -> None:
        """Raises AssertionError unless all records agree."""
        self.table.check_integrity(self.running)
        self.cache.pending.check_integrity()
        states = dict.fromkeys(self.waiting, SequenceState.WAITING)
        states |= dict.fromkeys(self.running, SequenceState.RUNNING)
        states |= dict.fromkeys(self.waiting.resumable, SequenceState.RESUMABLE)
        states |= dict.fromkeys(self.cache.pending.waiting(), SequenceState.WAITING_FOR_PREFIX)
        if wrong := [seq.request.id for seq, state in states.items() if seq.state is not state]:
            raise AssertionError(f"the states of the sequences of {wrong} do not match their places")
        self.waiting.check_integrity([seq for seq in states if seq.queued])
        if self._reserved_rows != num_reservations:
            raise AssertionError("rows are reserved for no landing")
        for block_hash, producer in self.cache.pending.producers().items():
            is_waiting = isinstance(producer, Sequence) and producer.state is not SequenceState.RUNNING
            if is_waiting or self.pool.is_cached(block_hash):
                raise AssertionError("a block is pending that is in the cache, or has no producer")

    # ---- starting and preempting ----

    @property
    def _free_rows(self) -> int:
        """Number of rows for sequences that may start."""
        return self.table.free_rows - self._reserved_rows

    @property
    def _limits(self) -> AdmissionLimits:
        return AdmissionLimits(self._free_rows, self.headroom, self.version)

    def _next_waiting(self, now: float) -> Sequence | None:
        """The waiting sequence to start next; None if there is none, or if it is known not to fit."""
        return self._admission.first(now, self._limits) if self.waiting else None

    def _start_next(self, fits: Fits, now: float) -> Sequence | None:
        """Starts the next waiting sequence whose work fits. Returns None if none can start."""
        if not self.waiting:
            return None
        while isinstance(taken := self._admission.take_next(fits, now, self._limits), WaitsForPrefix):
            taken.seq.state = SequenceState.WAITING_FOR_PREFIX
            self.cache.pending.wait(taken.seq, taken.block)
            self._changes += 1  # a landing may fit now
        if taken is None:
            return None
        seq, cached = taken.seq, taken.cached_tokens
        if seq.queued:
            seq.cached_tokens = min(cached, seq.request.prompt_len)
            self.cached_tokens += seq.cached_tokens
            seq.queued_s = max(0.0, now - seq.request.received)  # a simulator's clock may be a little behind `received`
            self.waiting.first_run(seq, now)
        self.start(seq, taken.pages, cached, cached // BLOCK_SIZE)
        self.cache.claim(seq, seq.hashes[taken.found :], computes=True)
        return seq

    def _next_prefilling(self, fits: Fits) -> Sequence | None:
        """Takes the next of `_prefilling` whose work fits."""
        for index, seq in enumerate(self._prefilling):
            if fits(Work.prefill(seq.num_tokens - seq.num_computed, seq.num_computed)):
                return self._prefilling.pop(index)
        return None

    def _grow(self, seq: Sequence) -> bool:
        """Gives a running sequence pages for all its tokens, preempting newer ones. Returns False if it must wait."""
        while seq.num_pages * BLOCK_SIZE < seq.num_tokens:
            if self.add_page_to_each([seq]):
                continue
            newest = self.running[-1]
            if newest.lane_chunks:  # the prefill lane still uses its pages
                return False
            if len(self.running) > 1:
                self.preemptions += 1
                self._preempt(newest)
            if newest is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.pool.release(self._stop(seq))
        self._make_resumable([seq])

    def _stop(self, seq: Sequence) -> list[int]:
        self.running.remove(seq)
        pages = self.table.leave(seq)
        self._make_resumable(self.cache.pending.give_up(seq))
        return pages

    def _make_resumable(self, seqs: Iterable[Sequence]) -> None:
        """Queues preempted sequences, new forks, and those whose prefix has come, before those never scheduled."""
        for seq in seqs:
            seq.state = SequenceState.RESUMABLE
            self.waiting.resume(seq)
            self._changes += 1


def _always(work: Work) -> bool:
    return True


def _decodes(seq: Sequence) -> bool:
    """True if a running sequence has so few tokens to compute as one that decodes."""
    count = seq.num_tokens - seq.num_computed
    return count == 1 or (seq.first_token_sent and count <= MAX_DECODE_TOKENS)

"""The scheduler: which tokens a step computes, and in which pages.

There are no phases: every sequence has `num_computed` tokens and catches up with `num_tokens`. Running sequences go
before waiting ones, and those with one token to compute before those with more. Among themselves, older ones go first.
How many tokens the others may have, and where, is for others to say (`cpd.colocation.Room`).

A sequence is admitted when there are pages for all its tokens and, beside them, one for each running sequence and
reservation to grow by. When pages run out all the same, the newest running sequence is preempted: its pages go to the
cache, and it is the first to be admitted again.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import attrgetter

import numpy as np

from cpd.blocks import BLOCK_SIZE, blocks_for, extend_hashes
from cpd.colocation import Room
from cpd.perfmodel import Work
from engine.backlog import Backlog
from engine.host_tier import HostTier
from engine.pending import PendingBlocks
from engine.plan import Chunk, Plan
from engine.pool import BlockPool
from engine.sequence import Seq, SeqTable, State
from engine.waiting import Line


class Scheduler:
    """Owns the sequences and their pages.

    Args:
        pool: Where pages come from.
        max_len: Tokens of the longest sequence.
        max_num_seqs: Running sequences at most.
        copy_page: Copies a page's content, source to target, before the next step runs.
        step_ms: Predicts how long a prompt takes with nothing beside it.
        host: Where blocks may come back from.
        on_returned: Called when `take_returned` has something to do, on any thread.

    Attributes:
        running: Oldest first.
        line: Who runs next.
        reserved_rows: Rows kept free for reservations.
        backlog: The tokens of requests that have never been admitted.
        queued_work: What these lack.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_len: int,
        max_num_seqs: int,
        copy_page: Callable[[int, int], None],
        backlog: Backlog | None = None,
        step_ms: Callable[[Work], float] = lambda work: 0.0,
        host: HostTier | None = None,
        on_returned: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.table = SeqTable(max_num_seqs, max_len)
        self.pending = PendingBlocks[Seq]()
        self.running: list[Seq] = []
        self.line = Line()
        self.reserved_rows = 0
        self.backlog = backlog or Backlog()
        self.queued_work = Work()
        self.preemptions = 0
        self.cached_tokens = 0
        self._behind: list[Seq] = []
        self._copy_page = copy_page
        self._step_ms = step_ms
        self._host = host
        self._on_returned = on_returned

    def add(self, seq: Seq) -> None:
        """Puts a new sequence in the queue."""
        cached = min(self.cached_blocks(seq.hashes, seq.num_tokens) * BLOCK_SIZE, seq.num_tokens - 1)
        seq.queued, seq.work = True, Work.prefill(seq.num_tokens - cached, cached)
        self.queued_work += seq.work
        self.backlog.add(seq.request.tenant, seq.num_tokens, seq.request.received)
        self.line.push(seq, self._step_ms(seq.work) / 1e3)

    def cached_blocks(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """How many of the first blocks of a prompt need not be computed: they are in pages, or would come back."""
        found = len(self.pool.find(hashes))
        return found if self._host is None else found + self._host.worth(hashes, found, num_tokens)

    def decodes(self) -> Plan:
        """Begins a step: one token of each running sequence that lacks just one. Preempts for the pages they need."""
        singles: list[Chunk] = []
        behind: list[Seq] = []
        running = State.RUNNING
        for seq in tuple(self.running):
            if seq.state is not running or seq.aside:  # preempted for an older one, or busy
                continue
            known, computed = seq.num_tokens, seq.num_computed
            if seq.num_pages * BLOCK_SIZE < known and not self.grow(seq):
                continue
            if known - computed == 1:
                singles.append(Chunk(seq, computed, 1, seq.choices, True))
            else:
                behind.append(seq)
        self._behind = behind
        return Plan(singles)

    def decodes_after(self, step: Plan, now: float = 0.0) -> Plan | None:
        """The decodes after those of a step that is being computed, whatever tokens that chooses.

        Takes the pages that they need. None: something else is to be decided first, or there is nothing to compute.
        """
        if step.longer or any(not chunk.samples or len(chunk.choices) > 1 for chunk in step.singles):
            return None
        if self._next_in_line(now) is not None:
            return None
        live = [(index, chunk) for index, chunk in enumerate(step.singles) if chunk.seq.state is State.RUNNING]
        if len(live) != sum(not seq.aside for seq in self.running):  # somebody else is to come in
            return None
        going_on = [(index, chunk) for index, chunk in live if not self._ends(chunk.seq)]
        if any(chunk.seq.request.params.looks_back for _, chunk in going_on):
            return None
        short = [chunk.seq for _, chunk in going_on if chunk.seq.num_pages * BLOCK_SIZE == chunk.seq.num_tokens]
        own = self.pool.take(len(short))
        if own is None or not going_on:
            return None
        for seq, page in zip(short, own, strict=True):
            self.table.add_pages(seq, [page])
        return Plan(
            [Chunk(chunk.seq, chunk.start + 1, 1, chunk.seq.choices, samples=True) for _, chunk in going_on],
            fed=np.array([index for index, _ in going_on], np.int32),
        )

    def wants_prefill(self, now: float = 0.0) -> bool:
        """Whether `prefills` may find something to do."""
        return bool(self._behind) or self._next_in_line(now) is not None

    def prefills(self, step: Plan, room: Room, now: float = 0.0) -> Plan:
        """Adds prefills to the step that `decodes` began, as far as there is room, and admits and parks accordingly.

        Args:
            now: Whose turn it is depends on the time.

        Returns:
            What goes to the prefill lane.
        """
        aside = Plan()
        along, beside, left = room.along, room.beside, room.aside
        while along > 0 or left:
            longest = self.table.max_len if left or room.cut else along
            seq = self._next_behind(longest) or self._admit_next(longest, now)
            if seq is None:
                break
            count = seq.num_tokens - seq.num_computed
            if count <= along or room.cut:
                count = min(count, along)
                step.add(seq, seq.num_computed, count)
                along, beside = along - count, beside - count
                if beside < 0:
                    left = 0  # this batch wants the whole device
            else:
                count = min(count, left)
                aside.add(seq, seq.num_computed, count)
                along, left = min(along, beside), left - count
        return aside

    def prefill_after(self, step: Plan, room: Room) -> Plan:
        """The next chunk on the prefill lane after one that it computes: more of the same prompt.

        Nothing where the prompt ends in `step`, or has been ended, or what is left of it may ride along; and while
        sequences lack pages that are not there: the prompt may have to give its own up.
        """
        plan = Plan()
        if sum(seq.num_pages * BLOCK_SIZE < seq.num_tokens for seq in self.running) > self.pool.available:
            return plan
        for chunk in step.chunks:
            seq, start = chunk.seq, chunk.start + chunk.count
            if not chunk.samples and seq.state is State.RUNNING and seq.num_tokens - start > room.along:
                plan.add(seq, start, min(seq.num_tokens - start, room.aside))
        return plan

    def first_in_line(self, now: float = 0.0) -> Seq | None:
        """Who can't go on or start, when the plan is empty."""
        return self.running[0] if self.running else self.line.first(now)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run."""
        return self.pending.num_waiting + len(self.line)

    def running_work(self) -> tuple[Work, Work]:
        """What the sequences that have been admitted decode, and what they lack before they do."""
        num_decodes = context = 0
        lacking = Work()
        for seq in self.running:
            if seq.num_tokens - seq.num_computed == 1:
                num_decodes += 1
                context += seq.num_tokens
            else:
                lacking += Work.prefill(seq.num_tokens - seq.num_computed, seq.num_computed)
        for seq in (*self.line.returning, *self.pending.waiting()):
            if not seq.queued:
                lacking += Work.prefill(seq.num_tokens)
        return Work.decode(num_decodes, context), lacking

    @property
    def rows_left(self) -> bool:
        """Whether another sequence may run."""
        return self.table.free_rows > self.reserved_rows

    @property
    def headroom(self) -> int:
        """Pages kept for the growth of what runs, or is going to."""
        return len(self.running) + self.reserved_rows

    @property
    def quiet_steps(self) -> int:
        """So many steps from now on each do no more than to choose the next token of each sequence that is not aside.

        Nobody waits, nobody ends before the last of them but by a stop token, and there are pages for all of them.
        Whatever else can happen comes from outside, or from what is aside.
        """
        running = self.running
        if not running or self.line or self.pending.num_waiting:
            return 0
        most, decoding = self.table.max_len, self.decoding
        steps = self.pool.available // len(running) * BLOCK_SIZE if decoding else 0
        for seq in decoding:
            request, known = seq.request, seq.num_tokens
            params = request.params
            if known - seq.num_computed != 1 or request.prefill_only or not seq.reported:
                return 0
            if params.top_logprobs is not None:
                return 0
            steps = min(steps, request.prompt_len + params.max_tokens - known, most - known)
        return steps

    @property
    def decoding(self) -> list[Seq]:
        """The running sequences that are not aside."""
        return [seq for seq in self.running if not seq.aside]

    def advance(self, chunk: Chunk) -> None:
        """The chunk has been computed: publishes the blocks that are now complete."""
        seq = chunk.seq
        seq.num_computed = chunk.start + chunk.count
        if seq.num_computed >= (seq.num_published + 1) * BLOCK_SIZE:
            self.publish(seq)

    def publish(self, seq: Seq) -> None:
        """Makes the computed full blocks of a running sequence findable."""
        known, first, last = len(seq.hashes), seq.num_published, seq.num_computed // BLOCK_SIZE
        if known < last:
            tokens = self.table.tokens[seq.row, known * BLOCK_SIZE : last * BLOCK_SIZE]
            seq.hashes += extend_hashes(seq.hashes[-1] if known else seq.request.hash_root, tokens)
        hashes = seq.hashes[first:last]
        self.pool.publish(self.table.pages[seq.row, first:last].tolist(), hashes)
        self.wake(self.pending.published(hashes))
        seq.num_published = last

    def publish_pages(self, pages: Sequence[int], hashes: Sequence[bytes], first: int) -> None:
        """Makes full blocks, from number `first` on, findable in pages that the caller holds."""
        pages, hashes = pages[first:], hashes[first : len(pages)]
        self.pool.publish(pages, hashes)
        self.wake(self.pending.published(hashes))

    def start(self, seq: Seq, pages: list[int], num_computed: int, num_published: int) -> None:
        """Lets a sequence run in pages that it holds, and that have its first tokens and published blocks already."""
        self.table.enter(seq, pages)
        seq.num_computed, seq.num_published = num_computed, num_published
        seq.state = State.RUNNING
        insort(self.running, seq, key=attrgetter("order"))

    def fork(self, seq: Seq, choice: int, token_ids: Sequence[int]) -> Seq:
        """A choice leaves the running `seq`, whose tokens are all computed, with its own next tokens.

        The two share the full pages; the partial last one is copied. Without a free page or row the new sequence
        waits as if preempted.
        """
        shared = self.table.pages_of(seq)
        partial = shared.pop() if seq.num_tokens % BLOCK_SIZE else None
        child = Seq(
            request=seq.request,
            choices=[choice],
            order=(seq.order[0], choice),
            hashes=seq.hashes[: seq.num_published],
            tokens=np.append(self.table.tokens_of(seq), np.array(token_ids, dtype=np.int32)),
            num_tokens=seq.num_tokens + len(token_ids),
            reported=True,
        )
        own = self.pool.take(0 if partial is None else 1) if self.rows_left else None
        if own is None:
            self.line.put_back(child)
            return child
        self.pool.hold(shared)
        if partial is not None:
            self._copy_page(partial, own[0])
        self.start(child, shared + own, seq.num_computed, seq.num_published)
        return child

    def finish(self, seq: Seq) -> list[int]:
        """Takes a sequence out, whatever its state. Returns its pages, which are the caller's to release."""
        pages: list[int] = []
        if seq.state is State.RUNNING:
            pages = self._stop(seq)
        elif seq.state is State.PARKED:
            self.pending.stop_waiting(seq)
        else:
            self.line.remove(seq)
        if seq.queued:
            self.backlog.remove(seq.request.tenant, seq.num_tokens)
            self._not_queued(seq)
        seq.state = State.FINISHED
        return pages

    def wake(self, seqs: Iterable[Seq]) -> None:
        """Parked sequences that may go on."""
        for seq in seqs:
            self.line.put_back(seq)

    def seqs(self) -> list[Seq]:
        """All of them, in whatever state."""
        return [*self.running, *self.pending.waiting(), *self.line]

    def held_pages(self) -> list[int]:
        """The pages of all running sequences; a page as often as it is held."""
        return [page for seq in self.running for page in self.table.pages_of(seq)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        self.table.check_integrity(self.running)
        self.pending.check_integrity()
        parked = self.pending.waiting()
        for state, seqs in (
            (State.RUNNING, self.running),
            (State.RETURNING, self.line.returning),
            (State.PARKED, parked),
            (State.QUEUED, list(self.line.queue)),
        ):
            if any(seq.state is not state for seq in seqs):
                raise AssertionError(f"a sequence among the {state.name.lower()} ones is in another state")
        queued = [seq for seq in (*parked, *self.line) if seq.queued]
        if self.backlog.tokens != sum(seq.num_tokens for seq in queued):
            raise AssertionError("the count of queued tokens is wrong")
        if self.queued_work != Work.total(seq.work for seq in queued):
            raise AssertionError("the work of the queued sequences is wrong")
        for block_hash, filler in self.pending.fillers().items():
            if self.pool.is_cached(block_hash) or (isinstance(filler, Seq) and filler.state is not State.RUNNING):
                raise AssertionError("a block is pending that is in the cache, or that nobody fills")

    def _ends(self, seq: Seq) -> bool:
        """Whether the next token is the last one, whatever it is."""
        request = seq.request
        most = min(request.prompt_len + request.params.max_tokens, self.table.max_len)
        return request.prefill_only or seq.num_tokens + 1 >= most

    def _next_behind(self, longest: int) -> Seq | None:
        """Takes the next running sequence out that lacks no more tokens than `longest`."""
        for index, seq in enumerate(self._behind):
            if seq.num_tokens - seq.num_computed <= longest:
                return self._behind.pop(index)
        return None

    def _next_in_line(self, now: float) -> Seq | None:
        """Who comes next, if there is a row, and not still too few pages."""
        seq = self.line.first(now)
        if seq is not None and not self.rows_left:
            self.line.short(seq, -1, 0)
            return None
        if seq is None or self.line.still_short(seq, self.pool.available, self.headroom):
            return None
        return seq

    def _admit_next(self, longest: int, now: float) -> Seq | None:
        """Admits the next in line, parking those whose next block somebody is filling.

        One that lacks more tokens than `longest` waits for the prefill lane; meanwhile shorter ones may pass it. None:
        nobody can start now.
        """
        while (seq := self._next_in_line(now)) is not None:
            found = self.pool.find(seq.hashes)
            awaited = self.pending.last_shared(seq.hashes, len(found))
            if awaited is None and self._host is not None:
                awaited = self.bring_back(seq.hashes, found, seq.num_tokens)
            if awaited is None:
                if seq.num_tokens - len(found) * BLOCK_SIZE > longest:
                    return self._admit_passing(seq, longest, now)
                return seq if self._admit(seq, found, now) else None
            self.line.take(seq)
            seq.state = State.PARKED
            self.pending.wait(seq, awaited)
        return None

    def bring_back(self, hashes: Sequence[bytes], found: list[int], num_tokens: int) -> bytes | None:
        """Has the host tier bring back what follows the pages `found`, if that is quicker than computing it and there
        are pages for the whole prompt. Returns the last block that comes; None: none does."""
        host, first = self._host, len(found)
        blocks = host.worth(hashes, first, num_tokens) if host is not None else 0
        coming = list(takewhile(lambda block_hash: not self._is_known(block_hash), hashes[first : first + blocks]))
        if host is None or not coming:
            return None
        back = host.bring_back(coming, found, blocks_for(num_tokens) - first + self.headroom, self._on_returned)
        if back is None:
            return None
        self.pending.claim(back, coming)
        return coming[-1]

    def take_returned(self) -> None:
        """Puts what has come back from the host tier in the cache."""
        while self._host is not None and self._host.done:
            back, good = self._host.collect()
            self.publish_pages(back.pages[:good], back.hashes, 0)
            self.wake(self.pending.give_up(back))
            self.pool.release(back.prefix + back.pages)

    def _is_known(self, block_hash: bytes) -> bool:
        return self.pool.is_cached(block_hash) or self.pending.is_filled(block_hash)

    def _admit_passing(self, first: Seq, longest: int, now: float) -> Seq | None:
        """Admits one that lacks no more than `longest` tokens, while `first`, whose turn it is, waits for the lane.

        That costs `first` nothing: a row and all the pages that it may need are left to it. So it can start as soon as
        the lane is free, which does not depend on who passes.
        """
        if self.table.free_rows - self.reserved_rows < 2:
            return None
        left = self.pool.available - self.headroom - blocks_for(first.num_tokens) - 1
        for seq in self.line.out_of_turn(now):
            # What it lacked when it came is cheap to know.
            if seq.work.tokens > longest or blocks_for(seq.num_tokens) > left:
                continue
            found = self.pool.find(seq.hashes)
            if seq.num_tokens - len(found) * BLOCK_SIZE > longest:
                continue
            if self.pending.last_shared(seq.hashes, len(found)) is None and self._admit(seq, found, now):
                return seq
        return None

    def _admit(self, seq: Seq, found: list[int], now: float) -> bool:
        """Starts the next in line, whose first blocks are in the pages `found`. False: too few pages.

        When all of it is cached, the last block is copied and the last token computed again: somebody must compute
        its logits, and nobody writes into a page that others read.
        """
        whole = len(found) * BLOCK_SIZE == seq.num_tokens
        shared = found[:-1] if whole else found
        need = blocks_for(seq.num_tokens) - len(shared)
        self.pool.hold(shared)
        own = self.pool.take(need) if self.pool.available >= need + self.headroom else None
        if own is None:
            self.pool.release(shared)
            self.line.short(seq, self.pool.available, self.headroom)
            return False
        if whole and own[0] != found[-1]:  # what was found may just have been taken: then its content is in place
            self._copy_page(found[-1], own[0])
        self.line.take(seq)
        if seq.queued:
            seq.cached_tokens = min(len(found) * BLOCK_SIZE - int(whole), seq.request.prompt_len)
            self.cached_tokens += seq.cached_tokens
            seq.queued_s = max(0.0, now - seq.request.received)  # simulated time may be a little behind
            self.backlog.take(seq.request.tenant, seq.num_tokens, now)
            self._not_queued(seq)
        self.start(seq, shared + own, seq.num_tokens - 1 if whole else len(shared) * BLOCK_SIZE, len(shared))
        self.pending.claim(seq, seq.hashes[len(found) :])
        if self._host is not None:
            self._host.computed(seq.hashes[len(found) :])
        return True

    def _not_queued(self, seq: Seq) -> None:
        self.queued_work -= seq.work
        seq.queued = False

    def grow(self, seq: Seq) -> bool:
        """Gets the pages that a running sequence lacks, from newer sequences if need be. False: it can't go on now."""
        while seq.num_pages * BLOCK_SIZE < seq.num_tokens:
            if (own := self.pool.take(1)) is not None:
                self.table.add_pages(seq, own)
                continue
            newest = self.running[-1]
            if newest.aside:  # the lane still uses its pages; they can be had when its chunk is computed
                return False
            if len(self.running) > 1:
                self._preempt(newest)
            if newest is seq:
                return False
        return True

    def _preempt(self, seq: Seq) -> None:
        self.preemptions += 1
        self.pool.release(self._stop(seq))
        self.line.put_back(seq)

    def _stop(self, seq: Seq) -> list[int]:
        self.running.remove(seq)
        pages = self.table.leave(seq)
        self.wake(self.pending.give_up(seq))
        return pages

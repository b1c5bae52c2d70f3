"""The live sequences: where each of them is in its life (`engine/sequence.py`), and its row and pages while it runs.

Who starts is decided in `engine/admission.py`, and what a step computes, in `engine/scheduler.py`. Here it is who gives
way when pages run out all the same: the newest running sequence is preempted. Its pages go to the cache, and it is the
first to be admitted again.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np

from cpd.blocks import BLOCK_SIZE, extend_hashes
from cpd.perfmodel import Work
from engine.backlog import Backlog
from engine.pending import PendingBlocks
from engine.plan import Chunk
from engine.pool import BlockPool
from engine.sequence import Seq, SeqTable, State
from engine.waiting import Line


class LiveSequences:
    """Owns the sequences and their pages.

    Args:
        pool: Where pages come from.
        max_len: Tokens of the longest sequence.
        max_num_seqs: Running sequences at most.
        copy_page: Copies a page's content, source to target, before the next step runs.

    Attributes:
        pool, copy_page: As given.
        table: Tokens and pages of those that run.
        pending: Blocks that somebody fills, and who is parked for them.
        running: Oldest first.
        line: Who runs next.
        reserved_rows: Rows kept free for reservations.
        backlog: The tokens of requests that have never been admitted.
        queued_work: What these lack.
        preemptions: So far.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_len: int,
        max_num_seqs: int,
        copy_page: Callable[[int, int], None],
        backlog: Backlog | None = None,
    ) -> None:
        self.pool = pool
        self.copy_page = copy_page
        self.table = SeqTable(max_num_seqs, max_len)
        self.pending = PendingBlocks[Seq]()
        self.running: list[Seq] = []
        self.line = Line()
        self.reserved_rows = 0
        self.backlog = backlog or Backlog()
        self.queued_work = Work()
        self.preemptions = 0

    @property
    def rows_left(self) -> bool:
        """Whether another sequence may run."""
        return self.table.free_rows > self.reserved_rows

    @property
    def headroom(self) -> int:
        """Pages kept for the growth of what runs, or is going to."""
        return len(self.running) + self.reserved_rows

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run."""
        return self.pending.num_waiting + len(self.line)

    @property
    def decoding(self) -> list[Seq]:
        """The running sequences that are not aside."""
        return [seq for seq in self.running if not seq.aside]

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

    def seqs(self) -> list[Seq]:
        """All of them, in whatever state."""
        return [*self.running, *self.pending.waiting(), *self.line]

    def held_pages(self) -> list[int]:
        """The pages of all running sequences; a page as often as it is held."""
        return [page for seq in self.running for page in self.table.pages_of(seq)]

    def queue(self, seq: Seq, work: Work, takes_s: float) -> None:
        """Puts a new sequence in the queue.

        Args:
            work: What it lacks.
            takes_s: How long that is predicted to take.
        """
        seq.queued, seq.work = True, work
        self.queued_work += work
        self.backlog.add(seq.request.tenant, seq.num_tokens, seq.request.received)
        self.line.push(seq, takes_s)

    def park(self, seq: Seq, awaited: bytes) -> None:
        """The next in line waits until somebody has filled this block."""
        self.line.take(seq)
        seq.state = State.PARKED
        self.pending.wait(seq, awaited)

    def wake(self, seqs: Iterable[Seq]) -> None:
        """Parked sequences that may go on."""
        for seq in seqs:
            self.line.put_back(seq)

    def first_turn(self, seq: Seq, now: float) -> None:
        """A sequence that has never been admitted is admitted."""
        self.backlog.take(seq.request.tenant, seq.num_tokens, now)
        self._not_queued(seq)

    def start(self, seq: Seq, pages: list[int], num_computed: int, num_published: int) -> None:
        """Lets a sequence run in pages that it holds, and that have its first tokens and published blocks already."""
        self.table.enter(seq, pages)
        seq.num_computed, seq.num_published = num_computed, num_published
        seq.state = State.RUNNING
        insort(self.running, seq, key=attrgetter("order"))

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
            self.copy_page(partial, own[0])
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

    def _not_queued(self, seq: Seq) -> None:
        self.queued_work -= seq.work
        seq.queued = False

    def _preempt(self, seq: Seq) -> None:
        self.preemptions += 1
        self.pool.release(self._stop(seq))
        self.line.put_back(seq)

    def _stop(self, seq: Seq) -> list[int]:
        self.running.remove(seq)
        pages = self.table.leave(seq)
        self.wake(self.pending.give_up(seq))
        return pages

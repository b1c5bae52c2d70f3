"""Admission: who of those who wait may start, and in which pages.

The next in line (`engine/waiting.py`) is admitted when there are a row, pages for all its tokens and, beside them, one
for each running sequence and reservation to grow by. What the cache has of it, it shares. While somebody else fills its
next block (a running sequence, a reservation, or a copy from host memory), it is parked.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from cpd.blocks import BLOCK_SIZE, blocks_for
from cpd.perfmodel import Work
from engine.host_tier import HostTier
from engine.live import LiveSequences
from engine.sequence import Seq


class Admission:
    """Lets sequences start.

    Args:
        step_ms: Predicts how long a prompt takes with nothing beside it.
        host: Where blocks may come back from.
        on_returned: Called when `take_returned` has something to do, on any thread.

    Attributes:
        cached_tokens: Of prompts, that were found in the cache so far.
    """

    def __init__(
        self,
        live: LiveSequences,
        *,
        step_ms: Callable[[Work], float] = lambda work: 0.0,
        host: HostTier | None = None,
        on_returned: Callable[[], None] = lambda: None,
    ) -> None:
        self.cached_tokens = 0
        self._live = live
        self._pool = live.pool
        self._pending = live.pending
        self._line = live.line
        self._step_ms = step_ms
        self._host = host
        self._on_returned = on_returned

    def add(self, seq: Seq) -> None:
        """Puts a new sequence in the queue."""
        cached = min(self.cached_blocks(seq.hashes, seq.num_tokens) * BLOCK_SIZE, seq.num_tokens - 1)
        work = Work.prefill(seq.num_tokens - cached, cached)
        self._live.queue(seq, work, self._step_ms(work) / 1e3)

    def cached_blocks(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """How many of the first blocks of a prompt need not be computed: they are in pages, or would come back."""
        found = len(self._pool.find(hashes))
        return found if self._host is None else found + self._host.worth(hashes, found, num_tokens)

    def next_in_line(self, now: float) -> Seq | None:
        """Who comes next, if there is a row, and not still too few pages."""
        seq = self._line.first(now)
        if seq is not None and not self._live.rows_left:
            self._line.short(seq, -1, 0)
            return None
        if seq is None or self._line.still_short(seq, self._pool.available, self._live.headroom):
            return None
        return seq

    def admit_next(self, longest: int, now: float) -> Seq | None:
        """Admits the next in line, parking those whose next block somebody is filling.

        One that lacks more tokens than `longest` waits for the prefill lane; meanwhile shorter ones may pass it. None:
        nobody can start now.
        """
        while (seq := self.next_in_line(now)) is not None:
            found = self._pool.find(seq.hashes)
            awaited = self._pending.last_shared(seq.hashes, len(found))
            if awaited is None and self._host is not None:
                awaited = self.bring_back(seq.hashes, found, seq.num_tokens)
            if awaited is None:
                if seq.num_tokens - len(found) * BLOCK_SIZE > longest:
                    return self._admit_passing(seq, longest, now)
                return seq if self._admit(seq, found, now) else None
            self._live.park(seq, awaited)
        return None

    def bring_back(self, hashes: Sequence[bytes], found: list[int], num_tokens: int) -> bytes | None:
        """Has the host tier bring back what follows the pages `found`, if that is quicker than computing it and there
        are pages for the whole prompt. Returns the last block that comes; None: none does."""
        host, first = self._host, len(found)
        blocks = host.worth(hashes, first, num_tokens) if host is not None else 0
        coming = list(takewhile(lambda block_hash: not self._is_known(block_hash), hashes[first : first + blocks]))
        if host is None or not coming:
            return None
        back = host.bring_back(coming, found, blocks_for(num_tokens) - first + self._live.headroom, self._on_returned)
        if back is None:
            return None
        self._pending.claim(back, coming)
        return coming[-1]

    def take_returned(self) -> None:
        """Puts what has come back from the host tier in the cache."""
        while self._host is not None and self._host.done:
            back, good = self._host.collect()
            self._live.publish_pages(back.pages[:good], back.hashes, 0)
            self._live.wake(self._pending.give_up(back))
            self._pool.release(back.prefix + back.pages)

    def _admit_passing(self, first: Seq, longest: int, now: float) -> Seq | None:
        """Admits one that lacks no more than `longest` tokens, while `first`, whose turn it is, waits for the lane.

        That costs `first` nothing: a row and all the pages that it may need are left to it. So it can start as soon as
        the lane is free, which does not depend on who passes.
        """
        if self._live.table.free_rows - self._live.reserved_rows < 2:
            return None
        left = self._pool.available - self._live.headroom - blocks_for(first.num_tokens) - 1
        for seq in self._line.out_of_turn(now):
            # What it lacked when it came is cheap to know.
            if seq.work.tokens > longest or blocks_for(seq.num_tokens) > left:
                continue
            found = self._pool.find(seq.hashes)
            if seq.num_tokens - len(found) * BLOCK_SIZE > longest:
                continue
            if self._pending.last_shared(seq.hashes, len(found)) is None and self._admit(seq, found, now):
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
        self._pool.hold(shared)
        own = self._pool.take(need) if self._pool.available >= need + self._live.headroom else None
        if own is None:
            self._pool.release(shared)
            self._line.short(seq, self._pool.available, self._live.headroom)
            return False
        if whole and own[0] != found[-1]:  # what was found may just have been taken: then its content is in place
            self._live.copy_page(found[-1], own[0])
        self._line.take(seq)
        if seq.queued:
            seq.cached_tokens = min(len(found) * BLOCK_SIZE - int(whole), seq.request.prompt_len)
            self.cached_tokens += seq.cached_tokens
            seq.queued_s = max(0.0, now - seq.request.received)  # simulated time may be a little behind
            self._live.first_turn(seq, now)
        self._live.start(seq, shared + own, seq.num_tokens - 1 if whole else len(shared) * BLOCK_SIZE, len(shared))
        self._pending.claim(seq, seq.hashes[len(found) :])
        if self._host is not None:
            self._host.computed(seq.hashes[len(found) :])
        return True

    def _is_known(self, block_hash: bytes) -> bool:
        return self._pool.is_cached(block_hash) or self._pending.is_filled(block_hash)

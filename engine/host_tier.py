"""The host tier: evicted blocks go to host memory, and come back where that is quicker than computing them.

    cached in a page ──evicted: copied out──▶ kept ──a prompt's turn──▶ kept, returning ──copied──▶ kept, and cached

The copy out comes before anything is written to the page. A return is a filler of its blocks like any other
(`engine/pending.py`): the prompt, and whoever needs them next, waits, and steps go on beside the copy. What a return
has until it is over:

| what                                         | so that                                   |
| pages for its blocks, taken                  | nobody else uses them; not findable yet   |
| the cached pages of the blocks before, held  | the prefix is still whole afterwards      |
| slots of the host pool, held                 | what is copied stays as it is             |

A damaged block (where checksums are on) and those after it do not come back, and are computed.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cpd.blocks import BLOCK_SIZE
from cpd.perfmodel import Work
from engine.host_pool import HostPool
from engine.pool import BlockPool
from engine.types import HostStats

MOST_OUT_MS = 10.0
"""Copies out that one eviction takes at most: what computes next waits for them. The rest of its blocks is lost."""


class HostMemory(Protocol):
    """Slots of one page each, in host memory, and the copies between them and the page pool."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_ms(self) -> float:
        """How long it takes to copy one page, as measured."""

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages, before any later step or `copy_back` changes them; for others see `Runner.settle`."""

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        """Copies slots to pages beside the steps.

        Args:
            on_done: Called when it is over, on any thread.

        Returns:
            How many of the first ones have come back undamaged.
        """


@dataclass(frozen=True, eq=False, slots=True)
class Return:
    """Blocks on their way back."""

    hashes: list[bytes]
    prefix: list[int]
    pages: list[int]
    slots: list[int]
    copy: Future[int]


class HostTier:
    """Keeps what `pool` evicts.

    Args:
        memory: Where it is kept.
        prefill_ms: Predicts how long a prefill takes.
    """

    def __init__(self, pool: BlockPool, memory: HostMemory, prefill_ms: Callable[[Work], float]) -> None:
        self._pool = pool
        self._memory = memory
        self._prefill_ms = prefill_ms
        self._slots = HostPool(memory.num_slots)
        self._returns: deque[Return] = deque()  # they end in this order
        self._most_out = max(1, int(MOST_OUT_MS / max(memory.slot_ms, 1e-6)))
        self._counts: Counter[str] = Counter()
        pool.back_with(self)

    def worth(self, hashes: Sequence[bytes], first: int, num_tokens: int) -> int:
        """How many blocks, from number `first` on, would come back for a prompt. 0: none, or computing is quicker.

        Args:
            hashes: Of all full blocks of the prompt; the first `first` are in the page pool.
            num_tokens: Its length.
        """
        blocks = self._slots.find(hashes[first:])
        if not blocks:
            return 0
        ahead = sum(len(under_way.pages) for under_way in self._returns)
        saved_ms = self._ms_after(first, num_tokens) - self._ms_after(first + blocks, num_tokens)
        return blocks if (ahead + blocks) * self._memory.slot_ms < saved_ms else 0

    def bring_back(
        self, hashes: Sequence[bytes], prefix: list[int], need: int, on_done: Callable[[], None]
    ) -> Return | None:
        """Starts to bring blocks back. None, and nothing changes, if there are too few pages.

        Args:
            hashes: Of the blocks, all of them kept.
            prefix: Pages of the blocks before them.
            need: So many pages must be available beside `prefix`.
            on_done: Called when the copy is over, on any thread.
        """
        self._pool.hold(prefix)
        if self._pool.available < need:
            self._pool.release(prefix)
            return None
        slots = self._slots.hold(hashes)  # before pages are taken: what is evicted for them wants slots, too
        pages = self._pool.take(len(hashes))
        assert pages is not None, "less was needed than is taken"
        back = Return(list(hashes), prefix, pages, slots, self._memory.copy_back(slots, pages, on_done))
        self._returns.append(back)
        return back

    @property
    def under_way(self) -> bool:
        """Whether blocks are on their way back."""
        return bool(self._returns)

    @property
    def done(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._returns) and self._returns[0].copy.done()

    def collect(self) -> tuple[Return, int]:
        """The first return is over. Its pages, and those of the prefix, are the caller's to publish and release.

        Returns:
            It, and how many of its blocks are good.
        """
        back = self._returns.popleft()
        good = back.copy.result()
        self._slots.release(back.slots)
        if good:
            self._counts["returned"] += good
        if good < len(back.hashes):
            if back.hashes[good] in self._slots:
                self._slots.forget(back.hashes[good])
                self._pool.lost(back.hashes[good])
            self._counts["damaged"] += 1
        return back, good

    def keep(self, pages: list[int], hashes: list[bytes]) -> list[bytes]:
        """See `engine.pool.Backing`."""
        skipped = max(0, len(pages) - self._most_out)
        new, evicted = self._slots.keep(hashes[skipped:])
        if new:
            self._memory.copy_out([pages[skipped + index] for index, _ in new], [slot for _, slot in new])
        for event, count in (("kept", len(new)), ("skipped", skipped), ("evicted", len(evicted))):
            if count:
                self._counts[event] += count
        gone = dict.fromkeys((*hashes, *evicted))  # what had no room may have gone for what follows it
        return [one for one in gone if one not in self._slots and not self._pool.is_cached(one)]

    def keeps(self, block_hash: bytes) -> bool:
        """See `engine.pool.Backing`."""
        return block_hash in self._slots

    def kept_hashes(self) -> list[bytes]:
        """See `engine.pool.Backing`."""
        return self._slots.kept_hashes()

    def returning(self, block_hash: bytes) -> bool:
        """Whether a block is on its way back."""
        return any(block_hash in back.hashes for back in self._returns)

    def computed(self, hashes: Sequence[bytes]) -> None:
        """A prompt that has these blocks next computes them, for whatever reason."""
        if blocks := self._slots.find(hashes):
            self._counts["computed"] += blocks

    def held_pages(self) -> list[int]:
        """What returns hold."""
        return [page for back in self._returns for page in (*back.prefix, *back.pages)]

    def stats(self) -> HostStats:
        """What is kept, and what has happened."""
        return HostStats(self._slots.num_slots, len(self._slots), dict(self._counts))

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        self._slots.check_integrity()
        if self._slots.holders() != Counter(slot for back in self._returns for slot in back.slots):
            raise AssertionError("slots of the host pool are held for nobody")

    def _ms_after(self, blocks: int, num_tokens: int) -> float:
        """What is left of a prompt takes so long when its first blocks are there."""
        left = max(1, num_tokens - blocks * BLOCK_SIZE)
        return self._prefill_ms(Work.prefill(left, num_tokens - left))

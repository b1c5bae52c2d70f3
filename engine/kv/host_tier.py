"""The host tier: evicted blocks are offloaded to host memory, and loaded where that is quicker than computing.

    cached in a page ──evicted: copied out──▶ offloaded ──a prompt needs it──▶ loading ──copied──▶ offloaded, and cached

The copy out comes before anything is written to the page. Sequences that need blocks which are being loaded wait for
them (`engine/scheduling/prefix_wait.py`), and steps go on beside the copy. What a load has until it is over:

| what                                         | so that                                   |
| pages for its blocks, taken                  | nobody else uses them; not findable yet   |
| the cached pages of the blocks before, held  | the prefix is still whole afterwards      |
| slots of the host pool, held                 | what is copied stays as it is             |

A damaged block (where checksums are on) and those after it are computed instead.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Work
from engine.kv.block_pool import BlockPool
from engine.kv.host_slots import HostPool
from engine.types import HostStats

MAX_OFFLOAD_MS = 10.0
"""Longest time that the copies of one eviction may take, as the next step waits for them. Its other blocks are lost."""


class HostMemory(Protocol):
    """Slots of one page each, in host memory, and the copies between them and the page pool."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_ms(self) -> float:
        """How long it takes to copy one page, as measured."""

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages, before any later step or `copy_back` changes them; for others see `Executor.settle`."""

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        """Copies slots to pages beside the steps.

        Args:
            on_done: Called when it is over, on any thread.

        Returns:
            How many of the first ones have come back undamaged.
        """


@dataclass(frozen=True, eq=False, slots=True)
class HostLoad:
    """Blocks that are being copied from host memory to pages."""

    hashes: list[bytes]
    prefix: list[int]
    pages: list[int]
    slots: list[int]
    copy: Future[int]


class HostTier:
    """Offloads what `pool` evicts.

    Args:
        memory: Where blocks are offloaded to.
        prefill_ms: Predicts how long a prefill takes.
    """

    def __init__(self, pool: BlockPool, memory: HostMemory, prefill_ms: Callable[[Work], float]) -> None:
        self._pool = pool
        self._memory = memory
        self._prefill_ms = prefill_ms
        self._slots = HostPool(memory.num_slots)
        self._loads: deque[HostLoad] = deque()  # they end in this order
        self._max_offloaded = max(1, int(MAX_OFFLOAD_MS / max(memory.slot_ms, 1e-6)))
        self._counts: Counter[str] = Counter()
        pool.offload_to(self)

    def should_load(self, hashes: Sequence[bytes], first: int, num_tokens: int) -> int:
        """How many blocks of a prompt, from number `first` on, to load. 0: none is there, or computing is quicker.

        Args:
            hashes: Of all full blocks of the prompt; the first `first` are in the page pool.
            num_tokens: Its length.
        """
        blocks = self._slots.find(hashes[first:])
        if not blocks:
            return 0
        ahead = sum(len(load.pages) for load in self._loads)
        saved_ms = self._ms_after(first, num_tokens) - self._ms_after(first + blocks, num_tokens)
        return blocks if (ahead + blocks) * self._memory.slot_ms < saved_ms else 0

    def load(
        self, hashes: Sequence[bytes], prefix: list[int], need: int, on_done: Callable[[], None]
    ) -> HostLoad | None:
        """Starts to load blocks. None, and nothing changes, if there are too few pages.

        Args:
            hashes: Of the blocks, all of them offloaded.
            prefix: Pages of the blocks before them.
            need: Pages that must be available beside `prefix`.
            on_done: Called when the copy is over, on any thread.
        """
        if self._pool.available_beside(prefix) < need:
            return None
        self._pool.hold(prefix)
        slots = self._slots.hold(hashes)  # before pages are taken: what is evicted for them wants slots, too
        pages = self._pool.take(len(hashes))
        assert pages is not None, "less was needed than is taken"
        load = HostLoad(list(hashes), prefix, pages, slots, self._memory.copy_back(slots, pages, on_done))
        self._loads.append(load)
        return load

    @property
    def is_loading(self) -> bool:
        """Whether blocks are being loaded."""
        return bool(self._loads)

    @property
    def done(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._loads) and self._loads[0].copy.done()

    def collect(self) -> tuple[HostLoad, int]:
        """The first load is over. Its pages, and those of the prefix, are the caller's to publish and release.

        Returns:
            It, and how many of its blocks are good.
        """
        load = self._loads.popleft()
        good = load.copy.result()
        self._slots.release(load.slots)
        if good:
            self._counts["returned"] += good
        if good < len(load.hashes):
            if load.hashes[good] in self._slots:
                self._slots.forget(load.hashes[good])
                self._pool.lost(load.hashes[good])
            self._counts["damaged"] += 1
        return load, good

    def offload(self, pages: list[int], hashes: list[bytes]) -> list[bytes]:
        """See `engine.kv.block_pool.OffloadTier`."""
        skipped = max(0, len(pages) - self._max_offloaded)
        new, evicted = self._slots.add(hashes[skipped:])
        if new:
            self._memory.copy_out([pages[skipped + index] for index, _ in new], [slot for _, slot in new])
        for event, count in (("kept", len(new)), ("skipped", skipped), ("evicted", len(evicted))):
            if count:
                self._counts[event] += count
        gone = dict.fromkeys((*hashes, *evicted))  # what had no room may have gone for what follows it
        return [one for one in gone if one not in self._slots and not self._pool.is_cached(one)]

    def has_offloaded(self, block_hash: bytes) -> bool:
        """See `engine.kv.block_pool.OffloadTier`."""
        return block_hash in self._slots

    def offloaded_hashes(self) -> list[bytes]:
        """See `engine.kv.block_pool.OffloadTier`."""
        return self._slots.block_hashes()

    def loads(self, block_hash: bytes) -> bool:
        """Whether a block is being loaded."""
        return any(block_hash in load.hashes for load in self._loads)

    def computed(self, hashes: Sequence[bytes]) -> None:
        """A prompt that has these blocks next computes them, for whatever reason."""
        if blocks := self._slots.find(hashes):
            self._counts["computed"] += blocks

    def held_pages(self) -> list[int]:
        """The pages that loads hold."""
        return [page for load in self._loads for page in (*load.prefix, *load.pages)]

    def stats(self) -> HostStats:
        """What is offloaded, and what has happened."""
        return HostStats(self._slots.num_slots, len(self._slots), dict(self._counts))

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        self._slots.check_integrity()
        if self._slots.holders() != Counter(slot for load in self._loads for slot in load.slots):
            raise AssertionError("slots of the host pool are held for nobody")

    def _ms_after(self, blocks: int, num_tokens: int) -> float:
        """How long the rest of a prompt takes when its first blocks are there."""
        left = max(1, num_tokens - blocks * BLOCK_SIZE)
        return self._prefill_ms(Work.prefill(left, num_tokens - left))

"""The host tier: evicted blocks are offloaded to host memory, and loaded again if that is quicker than computing.

    cached in a page ──evicted: copied out──▶ offloaded ──a prompt needs it──▶ loading ──copied──▶ offloaded, and cached

A block is copied out before anything is written to its page. Sequences that need blocks which are being loaded wait for
them (`engine/scheduling/prefix_wait.py`); steps go on beside the copy. Until it is over, a load has

| what                                         | so that                                            |
| pages for its blocks, taken                  | nobody else uses them; they can't be found yet     |
| the cached pages of the blocks before, held  | the prefix is still complete afterwards            |
| slots of the host pool, held                 | their content does not change while it is copied   |

A damaged block (if checksums are on) and the blocks after it are computed instead.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Work
from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.types import HostStats

MAX_OFFLOAD_MS = 10.0
"""Maximum time for the copies of one eviction, for which the next step waits. Blocks beyond it are lost."""


class HostMemory(Protocol):
    """Slots of one page each in host memory, and copies between them and the page pool."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_ms(self) -> float:
        """Measured time to copy one page."""

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages before any later step or `copy_back` changes them. For other writers see `Executor.settle`."""

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        """Copies slots to pages, in the background.

        Args:
            on_done: Called on any thread when the copy is over.

        Returns:
            The number of leading slots that came back undamaged.
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
    """Offloads the blocks that `pool` evicts.

    Args:
        memory: The host memory.
        prefill_ms: Predicts how long a prefill takes.

    Attributes:
        max_offloaded: Maximum number of blocks that one eviction offloads.
    """

    def __init__(self, pool: BlockPool, memory: HostMemory, prefill_ms: Callable[[Work], float]) -> None:
        self._pool = pool
        self._memory = memory
        self._prefill_ms = prefill_ms
        self._slots = HostPool(memory.num_slots)
        self._loads: deque[HostLoad] = deque()  # in the order in which they end
        self.max_offloaded = max(1, int(MAX_OFFLOAD_MS / max(memory.slot_ms, 1e-6)))
        self._counts: Counter[str] = Counter()
        pool.offload_to(self)

    def should_load(self, hashes: Sequence[bytes], first: int, num_tokens: int) -> int:
        """Number of blocks of a prompt, from index `first` on, to load; 0 if there are none or computing is quicker.

        Args:
            hashes: Hashes of all full blocks of the prompt. The first `first` blocks are in the page pool.
            num_tokens: Length of the prompt.
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
        """Starts to load blocks. Returns None if there are too few pages.

        Args:
            hashes: Hashes of the blocks, which are all offloaded.
            prefix: Pages of the blocks before them.
            need: Number of pages that must be available beside `prefix`.
            on_done: Called on any thread when the copy is over.
        """
        if self._pool.available_beside(prefix) < need:
            return None
        self._pool.hold(prefix)
        slots = self._slots.hold(hashes)  # before pages are taken, because blocks evicted for them take slots, too
        pages = self._pool.take(len(hashes))
        assert pages is not None, "less was needed than is taken"
        load = HostLoad(list(hashes), prefix, pages, slots, self._memory.copy_back(slots, pages, on_done))
        self._loads.append(load)
        return load

    @property
    def is_loading(self) -> bool:
        """True if blocks are being loaded."""
        return bool(self._loads)

    @property
    def done(self) -> bool:
        """True if there is a load to collect."""
        return bool(self._loads) and self._loads[0].copy.done()

    def collect(self) -> tuple[HostLoad, int]:
        """Collects the first load, which is over. The caller publishes and releases its pages and those of the prefix.

        Returns:
            The load, and the number of its leading blocks that are undamaged.
        """
        load = self._loads.popleft()
        good = load.copy.result()
        self._slots.release(load.slots)
        if good:
            self._counts["loaded"] += good
        if good < len(load.hashes):
            if load.hashes[good] in self._slots:
                self._slots.forget(load.hashes[good])
                self._pool.lost(load.hashes[good])
            self._counts["damaged"] += 1
        return load, good

    def offload(self, pages: list[int], hashes: list[bytes]) -> list[bytes]:
        """See `engine.kv.block_pool.OffloadTier`."""
        skipped = max(0, len(pages) - self.max_offloaded)
        new, evicted = self._slots.add(hashes[skipped:])
        if new:
            self._memory.copy_out([pages[skipped + index] for index, _ in new], [slot for _, slot in new])
        for event, count in (("offloaded", len(new)), ("skipped", skipped), ("evicted", len(evicted))):
            if count:
                self._counts[event] += count
        gone = dict.fromkeys((*hashes, *evicted))  # a block of `hashes` may have been evicted for a later one
        return [one for one in gone if one not in self._slots and not self._pool.is_cached(one)]

    def has_offloaded(self, block_hash: bytes) -> bool:
        """See `engine.kv.block_pool.OffloadTier`."""
        return block_hash in self._slots

    def offloaded_hashes(self) -> list[bytes]:
        """See `engine.kv.block_pool.OffloadTier`."""
        return self._slots.block_hashes()

    def loads(self, block_hash: bytes) -> bool:
        """True if a block is being loaded."""
        return any(block_hash in load.hashes for load in self._loads)

    def computed(self, hashes: Sequence[bytes]) -> None:
        """Counts the offloaded ones of a prompt's next blocks, which are computed all the same."""
        if blocks := self._slots.find(hashes):
            self._counts["recomputed"] += blocks

    def held_pages(self) -> list[int]:
        """The pages that loads hold."""
        return [page for load in self._loads for page in (*load.prefix, *load.pages)]

    def stats(self) -> HostStats:
        """Figures for the load report."""
        return HostStats(self._slots.num_slots, len(self._slots), dict(self._counts))

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        self._slots.check_integrity()
        if self._slots.holders() != Counter(slot for load in self._loads for slot in load.slots):
            raise AssertionError("slots of the host pool are held, but not for a load")

    def _ms_after(self, blocks: int, num_tokens: int) -> float:
        """Predicted time to compute the rest of a prompt whose first blocks are cached."""
        left = max(1, num_tokens - blocks * BLOCK_SIZE)
        return self._prefill_ms(Work.prefill(left, num_tokens - left))

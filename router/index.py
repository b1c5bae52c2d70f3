"""Which worker has cached which blocks, by the 64 bits of their hashes that cache events carry.

Every worker has a bit, and a set of workers is a number of such bits. Every stored block refers to the set of its
holders; equal sets are one, so that a system prompt that all workers have costs as much as a block of one worker.

A forgotten worker's bit counts no more at once. Its traces are cleared up in pieces, by `sweep`; then another worker
can have its bit.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpd.errors import CPDError
from router.blocktable import KEY_BYTES, BlockTable
from router.holders import Adding, HolderSets, Removing
from router.lru import LRU

_LOOKUP_BLOCKS = 256
"""Looked up at a time: the rest of a long prompt is not, where nobody has these."""

_REMEMBERED_GROUPS = 64
"""Answers for sets of workers that have equally many blocks."""

_SWEEP_SETS = 2048
"""Looked through at a time, in about 0.5 ms."""


class InvalidEventError(CPDError):
    """A worker announced what can't be true of its cache."""


@dataclass(slots=True)
class _Worker:
    """A worker's bit, the blocks that it can hold and those that it holds."""

    bit: int
    capacity: int
    size: int = 0


class PrefixIndex:
    """The cached blocks of every worker, as of its last event."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._sets = HolderSets()
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []  # by bit
        self._free_bits: list[int] = []
        self._live = 0
        self._dead = 0
        self._sweeping: Iterator[None] = iter(())
        self._remembered: LRU[tuple[int, int], dict[str, int]] = LRU(_REMEMBERED_GROUPS)

    def reset(self, worker_id: str, capacity: int) -> None:
        """The worker has announced nothing (a new session begins); it will never hold more than `capacity` blocks."""
        self.forget(worker_id)
        if not self._free_bits:
            self._free_bits.append(len(self._names))
            self._names.append("")
        number = self._free_bits.pop()
        self._names[number] = worker_id
        self._workers[worker_id] = _Worker(1 << number, capacity)
        self._live |= 1 << number
        self._remembered = LRU(_REMEMBERED_GROUPS)  # the bit may have been another worker's

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._live ^= worker.bit
            self._dead |= worker.bit

    def sweep(self) -> bool:
        """Does a piece of the clearing up after forgotten workers, about a millisecond; False when all is done."""
        for _ in self._sweeping:
            return True
        if not self._dead:
            return False
        dead, self._dead = self._dead, 0
        self._sweeping = self._clear_up(dead)
        return True

    def add(self, worker_id: str, hashes: bytes) -> None:
        """The worker has cached these blocks (8 bytes each).

        Raises:
            InvalidEventError: It had some of them already, or can't hold so many. The worker must be forgotten.
        """
        worker, count = self._workers[worker_id], _count(hashes)
        held = worker.size + count
        if held > worker.capacity:
            raise InvalidEventError(f"it announced {held} cached blocks, but it has only {worker.capacity} pages")
        faults = self._change(hashes, Adding(self._sets, self._live, worker.bit))
        worker.size += count - faults
        if faults:
            raise InvalidEventError(f"it stored {faults} blocks that it had stored before")

    def remove(self, worker_id: str, hashes: bytes) -> None:
        """The worker has evicted these blocks (8 bytes each).

        Raises:
            InvalidEventError: It did not have some of them. The worker must be forgotten.
        """
        worker, count = self._workers[worker_id], _count(hashes)
        faults = self._change(hashes, Removing(self._sets, self._live, worker.bit))
        worker.size -= count - faults
        if faults:
            raise InvalidEventError(f"it removed {faults} blocks that it had not stored")

    def size(self, worker_id: str) -> int:
        """Number of blocks that the worker has cached; 0 for an unknown one."""
        worker = self._workers.get(worker_id)
        return worker.size if worker else 0

    def __len__(self) -> int:
        """Number of different blocks that are stored, those of forgotten workers included until they are swept."""
        return len(self._table)

    def cached_prefixes(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of the leading blocks (hashes of 16 bytes each) each worker has that has the first one."""
        if not block_hashes or self._table.lacks(block_hashes[0][:KEY_BYTES]):
            return {}
        shorts = np.frombuffer(b"".join(block_hashes), dtype="<u8")[::2]
        masks = self._sets.masks
        leaving: list[tuple[int, int]] = []  # the number of blocks, and the workers that have no more than these
        depth, alive, same = 0, self._live, 0
        for start in range(0, len(shorts), _LOOKUP_BLOCKS):
            part = shorts[start : start + _LOOKUP_BLOCKS]
            found = self._table.leading(part)
            for number in found:
                if number != same:
                    rest = alive & masks[number]
                    if rest != alive:
                        leaving.append((depth, alive ^ rest))
                        alive = rest
                    same = number
                depth += 1
            if not alive or len(found) < len(part):
                break
        leaving.append((depth, alive))
        groups = [group for group in leaving if group[0] > 0]
        if not groups:
            return {}
        # most often all workers have the same system prompt, and few have more
        named = self._alike(groups[0][0], sum(mask for _, mask in groups)).copy()
        return named | self._named(groups[1:]) if len(groups) > 1 else named

    def _change(self, hashes: bytes, change: Mapping[int, int]) -> int:
        """Changes the holders of these blocks. Returns for how many of them nothing changed."""
        faults = 0
        counts = Counter(self._table.update(hashes, change))
        for old, count in counts.items():
            self._sets.count(change[old], count)
        for old, count in counts.items():
            self._sets.count(old, -count)
            if change[old] == old:
                faults += count
        return faults

    def _alike(self, depth: int, mask: int) -> dict[str, int]:
        """As `_named` for one group, remembered."""
        known = self._remembered.get((depth, mask))
        if known is None:
            known = self._named([(depth, mask)])
            self._remembered.put((depth, mask), known, 1)
        return known

    def _named(self, groups: Sequence[tuple[int, int]]) -> dict[str, int]:
        """The number of blocks of every worker, where `groups` has it for disjoint sets of workers."""
        width = -(-len(self._names) // 8)
        masks = b"".join([mask.to_bytes(width, "little") for _, mask in groups])
        bits = np.unpackbits(np.frombuffer(masks, dtype=np.uint8), bitorder="little")
        group, worker = np.divmod(np.flatnonzero(bits.view(np.bool_)), max(8 * width, 1))
        depths = np.array([depth for depth, _ in groups])
        return dict(zip(map(self._names.__getitem__, worker.tolist()), depths[group].tolist(), strict=True))

    def _clear_up(self, dead: int) -> Iterator[None]:
        emptied: list[int] = []
        for start in range(0, len(self._sets.masks), _SWEEP_SETS):
            emptied += self._sets.strip(dead, start, start + _SWEEP_SETS)
            yield
        yield from self._table.erase(emptied)
        self._sets.free(emptied)
        for number in range(len(self._names)):
            if dead >> number & 1:
                self._names[number] = ""
                self._free_bits.append(number)


def _count(hashes: bytes) -> int:
    if len(hashes) % KEY_BYTES:
        raise InvalidEventError(f"it sent {len(hashes)} bytes of block hashes, which have {KEY_BYTES} each")
    return len(hashes) // KEY_BYTES

"""The index of cached blocks: which worker has which block in which tier. Its keys are 64 bits of the block hashes.

Each worker has two bits: one for "has the block cached" (in a page or in host memory), one for "has it in a page". A
worker set is an integer of such bits. Each stored block refers to a worker set, and blocks with equal sets share one: a
system prompt that all workers have takes as little memory as one that a single worker has. A walk along a prompt's
blocks finds where each bit ends: the number of leading blocks that each worker has cached, and has in pages.

The bits of a forgotten worker are ignored at once. `sweep` clears them in pieces; then another worker can get them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cpd.common.blocks import Tier
from router.checks import ProtocolError
from router.lru import LRU
from router.prefix_index.block_table import KEY_BYTES, NO_KEY, BlockTable
from router.prefix_index.worker_sets import SetAfterMove, WorkerSets

_LOOKUP_BLOCKS = 256
"""Blocks looked up at once; the lookup ends early if no worker has them."""

_CACHED_GROUPS = 64
"""Number of cached results of `_group`."""

_FEW_BITS = 32
"""Up to this many bits a loop is faster than array operations."""

_SWEEP_SETS = 2048
"""Worker sets swept at once, in about 0.5 ms."""


class Prefixes(NamedTuple):
    """The leading blocks of one prompt that the workers have cached.

    Attributes:
        cached: For each worker that has some: the number of leading blocks in pages or host memory.
        in_pages: For each worker where only a part of them is in pages: the number before the first other one.
    """

    cached: Mapping[str, int] = MappingProxyType({})
    in_pages: Mapping[str, int] = MappingProxyType({})


@dataclass
class _Worker:
    """A worker's bits, the bits of a block in each tier, and the number of blocks it has cached."""

    all_bits: int
    bits: dict[Tier, int]
    size: int = 0


class PrefixIndex:
    """The cached blocks of all workers, by their last events."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._sets = WorkerSets()
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []  # by half the position of their first bits
        self._free_numbers: list[int] = []
        self._first_bits = 0  # the first bit of each name
        self._live = 0
        self._dead = 0
        self._sweeping: Iterator[None] = iter(())
        self._groups: LRU[tuple[int, int], dict[str, int]] = LRU(_CACHED_GROUPS)

    def reset(self, worker_id: str) -> None:
        """Starts a new session with the worker, without any blocks."""
        self.forget(worker_id)
        if not self._free_numbers:
            self._free_numbers.append(len(self._names))
            self._first_bits |= 1 << 2 * len(self._names)
            self._names.append("")
        number = self._free_numbers.pop()
        self._names[number] = worker_id
        first, both = 0b01 << 2 * number, 0b11 << 2 * number
        self._workers[worker_id] = _Worker(both, {Tier.PAGES: both, Tier.HOST: first, Tier.NONE: 0})
        self._live |= both
        self._groups = LRU(_CACHED_GROUPS)  # the bits may have been another worker's

    def forget(self, worker_id: str) -> None:
        """Removes the worker."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._live ^= worker.all_bits
            self._dead |= worker.all_bits

    def sweep(self) -> bool:
        """Clears forgotten workers for about a millisecond. Returns False when there is nothing left to do."""
        for _ in self._sweeping:
            return True
        if not self._dead:
            return False
        dead, self._dead = self._dead, 0
        self._sweeping = self._clear(dead)
        return True

    def move(self, worker_id: str, hashes: bytes, tier: Tier) -> None:
        """Records that the worker now has these blocks (8 bytes each) in this tier.

        Raises:
            ProtocolError: The hashes are malformed.
        """
        _check(hashes)
        worker = self._workers[worker_id]
        change = SetAfterMove(self._sets, self._live, worker.all_bits, worker.bits[tier])
        moved = self._table.update(hashes, change)
        for old, count in moved.items():
            had = self._sets.masks[old] & worker.all_bits
            worker.size += count * ((tier is not Tier.NONE) - bool(had))
            self._sets.count(change[old], count)
        for old, count in moved.items():
            self._sets.count(old, -count)

    def size(self, worker_id: str) -> int:
        """Number of blocks that the worker has cached; 0 if it is unknown."""
        worker = self._workers.get(worker_id)
        return worker.size if worker else 0

    def __len__(self) -> int:
        """Number of different blocks stored, including those of forgotten workers before the sweep."""
        return len(self._table)

    def cached_prefixes(self, block_hashes: Sequence[bytes]) -> Prefixes:
        """Returns the leading blocks that the workers have cached, of a prompt with these hashes (16 bytes each)."""
        if not block_hashes or self._table.lacks(block_hashes[0][:KEY_BYTES]):
            return Prefixes()
        shorts = np.frombuffer(b"".join(block_hashes), dtype="<u8")[::2]
        masks = self._sets.masks
        leaving: list[tuple[int, int]] = []  # a number of blocks, and the bits that end there
        depth, alive = 0, self._live
        for start in range(0, len(shorts), _LOOKUP_BLOCKS):
            part = shorts[start : start + _LOOKUP_BLOCKS]
            found = self._table.leading(part)
            for number in dict.fromkeys(found):
                rest = alive & masks[number]
                if rest != alive:
                    leaving.append((start + found.index(number), alive ^ rest))
                    alive = rest
            depth = start + len(found)
            if not alive or len(found) < len(part):
                break
        leaving.append((depth, alive))
        cached: list[tuple[int, int]] = []  # likewise, the first bits that end there
        in_pages: list[tuple[int, int]] = []  # likewise, of workers that have the next blocks in host memory
        for depth, bits in leaving:
            ending = bits & self._first_bits
            if ending and depth:
                cached.append((depth, ending))
            if going_on := bits >> 1 & self._first_bits & ~ending:
                in_pages.append((depth, going_on))
        if not cached:
            return Prefixes()
        # usually all workers have the same system prompt, and few have more of the prompt
        named = self._group(cached[0][0], sum(bits for _, bits in cached)).copy()
        if len(cached) > 1:
            named |= self._named(cached[1:])
        return Prefixes(named, self._named(in_pages) if in_pages else {})

    def _group(self, depth: int, mask: int) -> dict[str, int]:
        """`_named` for one group of workers with the same number of blocks, cached."""
        known = self._groups.get((depth, mask))
        if known is None:
            known = self._named([(depth, mask)])
            self._groups.put((depth, mask), known, 1)
        return known

    def _named(self, groups: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Returns each worker's number of blocks, from pairs of that number and the first bits of its workers."""
        if sum(mask.bit_count() for _, mask in groups) <= _FEW_BITS:
            return {self._names[bit // 2]: depth for depth, mask in groups for bit in _bits(mask)}
        width = -(-len(self._names) // 4)
        masks = b"".join([mask.to_bytes(width, "little") for _, mask in groups])
        bits = np.unpackbits(np.frombuffer(masks, dtype=np.uint8), bitorder="little")[::2]
        group, worker = np.divmod(np.flatnonzero(bits.view(np.bool_)), max(4 * width, 1))
        depths = np.array([depth for depth, _ in groups])
        return dict(zip(map(self._names.__getitem__, worker.tolist()), depths[group].tolist(), strict=True))

    def _clear(self, dead: int) -> Iterator[None]:
        emptied: list[int] = []
        for start in range(0, len(self._sets.masks), _SWEEP_SETS):
            emptied += self._sets.strip(dead, start, start + _SWEEP_SETS)
            yield
        yield from self._table.erase(emptied)
        self._sets.free(emptied)
        for number in range(len(self._names)):
            if dead >> 2 * number & 1:
                self._names[number] = ""
                self._free_numbers.append(number)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _check(hashes: bytes) -> None:
    if len(hashes) % KEY_BYTES:
        raise ProtocolError(f"it sent {len(hashes)} bytes of block hashes, which have {KEY_BYTES} each")
    if NO_KEY in hashes and 0 in memoryview(hashes).cast("Q"):
        raise ProtocolError("it sent a block hash of zero")

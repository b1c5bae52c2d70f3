"""Which worker has cached which blocks in which tier, by the 64 bits of their hashes that cache events carry.

Every worker has two bits: it has cached a block (in a page or in host memory), and it has it in a page. A set of
holders is a number of such bits. Every stored block refers to the set of its holders; equal sets are one, so that a
system prompt that all workers have costs as much as a block of one worker. A walk along a prompt's blocks finds where
each bit ends: how many leading blocks each worker has cached, and how many in pages.

A forgotten worker's bits count no more at once. Its traces are cleared up in pieces, by `sweep`; then another worker
can have its bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cpd.blocks import Tier
from cpd.errors import CPDError
from router.blocktable import KEY_BYTES, NO_KEY, BlockTable
from router.holders import HolderSets, Moving
from router.lru import LRU

_LOOKUP_BLOCKS = 256
"""Looked up at a time: the rest of a long prompt is not, where nobody has these."""

_REMEMBERED_GROUPS = 64
"""Answers for sets of workers that have equally many blocks."""

_FEW_BITS = 32
"""So many are looked for one after the other, in less time than array operations take for all."""

_SWEEP_SETS = 2048
"""Looked through at a time, in about 0.5 ms."""

_PLACES = {Tier.PAGES: "pages", Tier.HOST: "host memory"}


class InvalidEventError(CPDError):
    """A worker announced what can't be true of its cache."""


class Prefixes(NamedTuple):
    """What the workers have cached of one prompt.

    Attributes:
        cached: How many leading blocks each worker has, in pages or in host memory; without those that have none.
        in_pages: How many of these come before the first one that is in no page; only of workers that have such a one.
    """

    cached: Mapping[str, int] = MappingProxyType({})
    in_pages: Mapping[str, int] = MappingProxyType({})


@dataclass
class _Worker:
    """A worker: its bits, which of them a block in each tier has, how many can be there and how many are."""

    all_bits: int
    bits: dict[Tier, int]
    capacity: dict[Tier, float]
    sizes: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))  # NONE: minus all the others

    def __post_init__(self) -> None:
        self.tiers = {bits: tier for tier, bits in self.bits.items()}


class PrefixIndex:
    """The cached blocks of every worker, as of its last event."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._sets = HolderSets()
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []  # by half the position of their first bits
        self._free_numbers: list[int] = []
        self._first_bits = 0  # of all names
        self._live = 0
        self._dead = 0
        self._sweeping: Iterator[None] = iter(())
        self._remembered: LRU[tuple[int, int], dict[str, int]] = LRU(_REMEMBERED_GROUPS)

    def reset(self, worker_id: str, pages: int, host_pages: int = 0) -> None:
        """The worker has announced nothing (a new session begins); it will never hold more blocks than it has pages."""
        self.forget(worker_id)
        if not self._free_numbers:
            self._free_numbers.append(len(self._names))
            self._first_bits |= 1 << 2 * len(self._names)
            self._names.append("")
        number = self._free_numbers.pop()
        self._names[number] = worker_id
        first, both = 0b01 << 2 * number, 0b11 << 2 * number
        self._workers[worker_id] = _Worker(
            both,
            {Tier.PAGES: both, Tier.HOST: first, Tier.NONE: 0},
            {Tier.PAGES: pages, Tier.HOST: host_pages, Tier.NONE: inf},
        )
        self._live |= both
        self._remembered = LRU(_REMEMBERED_GROUPS)  # the bits may have been another worker's

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._live ^= worker.all_bits
            self._dead |= worker.all_bits

    def sweep(self) -> bool:
        """Does a piece of the clearing up after forgotten workers, about a millisecond; False when all is done."""
        for _ in self._sweeping:
            return True
        if not self._dead:
            return False
        dead, self._dead = self._dead, 0
        self._sweeping = self._clear_up(dead)
        return True

    def move(self, worker_id: str, hashes: bytes, tier: Tier) -> None:
        """The worker has these blocks (8 bytes each) in this tier now.

        Raises:
            InvalidEventError: Some of them were there before, or it has no room for so many. The worker must be
                forgotten.
        """
        worker = self._workers[worker_id]
        size = worker.sizes[tier] + _count(hashes)
        if size > worker.capacity[tier]:
            most = worker.capacity[tier]
            raise InvalidEventError(f"it announced {size} blocks in {_PLACES[tier]}, but it has room for only {most}")
        change = Moving(self._sets, self._live, worker.all_bits, worker.bits[tier])
        holders = self._table.update(hashes, change)
        faults = 0
        for old, count in holders.items():
            before = worker.tiers[self._sets.masks[old] & worker.all_bits]
            worker.sizes[before] -= count
            worker.sizes[tier] += count
            faults += count if before is tier else 0
            self._sets.count(change[old], count)
        for old, count in holders.items():
            self._sets.count(old, -count)
        if faults:
            if tier is Tier.NONE:
                raise InvalidEventError(f"it removed {faults} blocks that it had not stored")
            raise InvalidEventError(f"it stored {faults} blocks in {_PLACES[tier]} that it had stored there before")

    def size(self, worker_id: str) -> int:
        """Number of blocks that the worker has cached; 0 for an unknown one."""
        worker = self._workers.get(worker_id)
        return -worker.sizes[Tier.NONE] if worker else 0

    def __len__(self) -> int:
        """Number of different blocks that are stored, those of forgotten workers included until they are swept."""
        return len(self._table)

    def cached_prefixes(self, block_hashes: Sequence[bytes]) -> Prefixes:
        """What the workers have of the leading ones of these blocks (hashes of 16 bytes each)."""
        if not block_hashes or self._table.lacks(block_hashes[0][:KEY_BYTES]):
            return Prefixes()
        shorts = np.frombuffer(b"".join(block_hashes), dtype="<u8")[::2]
        masks = self._sets.masks
        leaving: list[tuple[int, int]] = []  # the number of blocks, and the bits that no more than these have
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
        cached: list[tuple[int, int]] = []  # likewise, the first bits of the workers that have cached no more
        in_pages: list[tuple[int, int]] = []  # and of those that have no more in pages, but in host memory
        for depth, bits in leaving:
            ending = bits & self._first_bits
            if ending and depth:
                cached.append((depth, ending))
            if going_on := bits >> 1 & self._first_bits & ~ending:
                in_pages.append((depth, going_on))
        if not cached:
            return Prefixes()
        # most often all workers have the same system prompt, and few have more
        named = self._alike(cached[0][0], sum(bits for _, bits in cached)).copy()
        if len(cached) > 1:
            named |= self._named(cached[1:])
        return Prefixes(named, self._named(in_pages) if in_pages else {})

    def _alike(self, depth: int, mask: int) -> dict[str, int]:
        """As `_named` for one group, remembered."""
        known = self._remembered.get((depth, mask))
        if known is None:
            known = self._named([(depth, mask)])
            self._remembered.put((depth, mask), known, 1)
        return known

    def _named(self, groups: Sequence[tuple[int, int]]) -> dict[str, int]:
        """The number of blocks of every worker, where `groups` has it for first bits of disjoint sets of workers."""
        if sum(mask.bit_count() for _, mask in groups) <= _FEW_BITS:
            return {self._names[bit // 2]: depth for depth, mask in groups for bit in _bits(mask)}
        width = -(-len(self._names) // 4)
        masks = b"".join([mask.to_bytes(width, "little") for _, mask in groups])
        bits = np.unpackbits(np.frombuffer(masks, dtype=np.uint8), bitorder="little")[::2]
        group, worker = np.divmod(np.flatnonzero(bits.view(np.bool_)), max(4 * width, 1))
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
            if dead >> 2 * number & 1:
                self._names[number] = ""
                self._free_numbers.append(number)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _count(hashes: bytes) -> int:
    if len(hashes) % KEY_BYTES:
        raise InvalidEventError(f"it sent {len(hashes)} bytes of block hashes, which have {KEY_BYTES} each")
    if NO_KEY in hashes and 0 in memoryview(hashes).cast("Q"):
        raise InvalidEventError("it sent zeros in the place of a block's hash")
    return len(hashes) // KEY_BYTES

"""The host pool: which evicted blocks are in host memory, and in which slots.

    free ──add──▶ filled ──hold──▶ held ──last release──▶ filled       the least recently used one is evicted first
      ▲             └──evicted──▶ filled with another block
      └──forget─────┘ (one that is held: at its last release)

| state  | owner                       | may be written by                | leaves the state when            |
| free   | nobody                      | nobody                           | a block is put into it           |
| filled | the host pool, evictable    | the copy out, which comes first  | held, evicted, or forgotten      |
| held   | the loads that read it      | nobody                           | the last of them is over         |

A slot has the size of a page. A block may also be in the page pool. Its content never changes, so it is not copied when
the page pool evicts it again.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class HostPool:
    """Slots `0 .. num_slots - 1` and the index of the blocks in them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # from the least to the most recently used
        self._free = list(range(num_slots - 1, -1, -1))
        self._holders: Counter[int] = Counter()
        self._forgotten: set[int] = set()  # held slots that have no block any more

    def __len__(self) -> int:
        """Number of blocks in the slots."""
        return len(self._slot_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    def add(self, hashes: Sequence[bytes]) -> tuple[list[tuple[int, int]], list[bytes]]:
        """Adds blocks, given from the least to the most recently used; only the last ones if there is too little room.

        Returns:
            For each block that was not there yet, its index in `hashes` and the slot to copy it to; and the blocks
            evicted for them.
        """
        first = max(0, len(hashes) - (self.num_slots - len(self._holders)))
        new = []
        for index in range(first, len(hashes)):
            if hashes[index] in self._slot_of:
                self._slot_of.move_to_end(hashes[index])
            else:
                new.append(index)
        # None of `hashes` is evicted here: there is room for all of them beside the held slots.
        slots, evicted = [], []
        for index in new:
            if not self._free:
                evicted.append(self._evict())
            slots.append(self._free.pop())
            self._slot_of[hashes[index]] = slots[-1]
        return list(zip(new, slots, strict=True)), evicted

    def find(self, hashes: Iterable[bytes]) -> int:
        """Number of leading blocks of a hash chain that are there. They are not held."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._slot_of:
                break
            count += 1
        return count

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Adds a holder to the slots of these blocks, given in block order. Returns the slots."""
        for block_hash in reversed(hashes):
            self._slot_of.move_to_end(block_hash)
        slots = [self._slot_of[block_hash] for block_hash in hashes]
        self._holders.update(slots)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Removes a holder from each slot."""
        for slot in slots:
            if self._holders[slot] < 1:
                raise AssertionError(f"slot {slot} was released more often than held")
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                if slot in self._forgotten:
                    self._forgotten.remove(slot)
                    self._free.append(slot)

    def forget(self, block_hash: bytes) -> None:
        """Removes a damaged block. A block that is not there any more is ignored."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is None:
            return
        if slot in self._holders:
            self._forgotten.add(slot)
        else:
            self._free.append(slot)

    def block_hashes(self) -> list[bytes]:
        """All blocks in the slots."""
        return list(self._slot_of)

    def holders(self) -> Counter[int]:
        """Number of holders of each held slot."""
        return self._holders.copy()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free, has one block, or is held without one."""
        slots = [*self._free, *self._slot_of.values(), *self._forgotten]
        if sorted(slots) != list(range(self.num_slots)):
            raise AssertionError("a slot of the host pool has two owners or none")
        if not self._forgotten <= self._holders.keys():
            raise AssertionError("a slot of the host pool has no block and is not held")
        if self._holders.keys() & set(self._free) or any(count < 1 for count in self._holders.values()):
            raise AssertionError("the holders of the host pool's slots are miscounted")

    def _evict(self) -> bytes:
        """Frees the slot of the least recently used block that is not held, and returns the block."""
        block_hash = next(block_hash for block_hash, slot in self._slot_of.items() if slot not in self._holders)
        self._free.append(self._slot_of.pop(block_hash))
        return block_hash

"""Sets of workers, as numbered bit masks.

Equal sets have the same number, except after a worker was removed from all sets: then two numbers may have equal sets.
"""

from collections.abc import Iterable

_FREE = -1


class WorkerSets:
    """The sets in use, by number. Number 0 is the empty set.

    Attributes:
        masks: The workers' bits in each set, by number.
    """

    def __init__(self) -> None:
        self.masks = [0]
        self._uses = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []

    def number(self, mask: int) -> int:
        """Returns the number of a set. The caller must `count` a new set before any other one."""
        known = self._numbers.get(mask)
        if known is not None:
            return known
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._uses.append(0)
        self._numbers[mask] = number
        return number

    def count(self, number: int, change: int) -> None:
        """Adds `change` to the number of blocks that refer to this set."""
        self._uses[number] += change
        if self._uses[number] == 0 and self.masks[number]:
            self._release(number)

    def strip(self, dead: int, start: int, end: int) -> list[int]:
        """Removes the bits of `dead` from the sets with numbers `start .. end - 1`.

        Returns:
            The sets that became empty. They stay in use until `free`.
        """
        emptied = []
        for number, mask in enumerate(self.masks[start:end], start):
            if mask != _FREE and mask & dead:
                rest = mask & ~dead
                self._forget_mask(number)
                self._numbers.setdefault(rest, number)  # unless another set became equal before
                self.masks[number] = rest
                if rest == 0:
                    emptied.append(number)
        return emptied

    def free(self, emptied: Iterable[int]) -> None:
        """Releases empty sets that no block refers to."""
        for number in emptied:
            self._release(number)

    def _release(self, number: int) -> None:
        self._forget_mask(number)
        self.masks[number], self._uses[number] = _FREE, 0
        self._free.append(number)

    def _forget_mask(self, number: int) -> None:
        if self._numbers.get(self.masks[number]) == number:
            del self._numbers[self.masks[number]]


class SetAfterMove(dict[int, int]):
    """Maps a block's set to its set after one of the `live` workers has moved the block; computed on demand.

    Args:
        all_bits: The worker's bits.
        bits: The worker's bits that are set afterwards.
    """

    def __init__(self, sets: WorkerSets, live: int, all_bits: int, bits: int) -> None:
        self._sets, self._live, self._all_bits, self._bits = sets, live, all_bits, bits

    def __missing__(self, number: int) -> int:
        workers = self._sets.masks[number] & self._live
        had = workers & self._all_bits
        self[number] = moved = number if had == self._bits else self._sets.number(workers ^ had | self._bits)
        return moved

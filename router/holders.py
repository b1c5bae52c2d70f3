"""Numbered sets of workers, as bit masks.

Where a worker is taken out of all sets, some of them become equal and stay two; otherwise every set is kept once.
"""

from collections.abc import Iterable

_FREE = -1


class HolderSets:
    """The sets that are in use, by number. Number 0 is the empty set.

    Attributes:
        masks: The workers' bits of each set, by number.
    """

    def __init__(self) -> None:
        self.masks = [0]
        self._uses = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []

    def number(self, mask: int) -> int:
        """The number of a set. A new one must be counted before it is asked for again elsewhere."""
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
        """So many blocks more, or fewer, have this set of holders."""
        self._uses[number] += change
        if self._uses[number] == 0 and self.masks[number]:
            self._release(number)

    def strip(self, dead: int, start: int, end: int) -> list[int]:
        """Takes the bits of `dead` out of the sets with numbers `start .. end - 1`.

        Returns:
            Those that became empty. They stay taken until `free`.
        """
        emptied = []
        for number, mask in enumerate(self.masks[start:end], start):
            if mask != _FREE and mask & dead:
                rest = mask & ~dead
                self._forget_mask(number)
                self._numbers.setdefault(rest, number)  # another set may have become equal before
                self.masks[number] = rest
                if rest == 0:
                    emptied.append(number)
        return emptied

    def free(self, emptied: Iterable[int]) -> None:
        """No block has these empty sets any more."""
        for number in emptied:
            self._release(number)

    def _release(self, number: int) -> None:
        self._forget_mask(number)
        self.masks[number], self._uses[number] = _FREE, 0
        self._free.append(number)

    def _forget_mask(self, number: int) -> None:
        if self._numbers.get(self.masks[number]) == number:
            del self._numbers[self.masks[number]]


class Moving(dict[int, int]):
    """By a block's set of holders, what it becomes when one of the `live` workers has other bits; the same where it has
    these bits already.

    Args:
        all_bits: The worker's.
        bits: Those that it is to have.
    """

    def __init__(self, sets: HolderSets, live: int, all_bits: int, bits: int) -> None:
        self._sets, self._live, self._all_bits, self._bits = sets, live, all_bits, bits

    def __missing__(self, number: int) -> int:
        holders = self._sets.masks[number] & self._live
        had = holders & self._all_bits
        self[number] = moved = number if had == self._bits else self._sets.number(holders ^ had | self._bits)
        return moved

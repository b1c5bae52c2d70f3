"""The tokens of words in flat memory, found for all words of a text at once.

A dict takes 0.13 us for one of 2,000 words, of which the most goes into making and hashing strings. Here a word is its
UTF-8 bytes in place, filled up with what is no UTF-8, and array operations compare all of them with what is in their
slots: 0.05 us a word. The slots are a hash table with linear probing; a word that finds no slot is not remembered.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_LANES = 4
_WIDTH = 8 * _LANES
MOST_BYTES = _WIDTH - 1
"""Of a word; so that each key ends with a byte that no text has."""

MOST_TOKENS = 8
"""Of a word."""

_FILL = 0xFF
_PROBES = 8

_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
"""Odd: a sum of multiples of them, of which the highest bits count, spreads keys over the slots."""

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


class WordTable:
    """Words of MOST_BYTES and MOST_TOKENS at most, and their tokens.

    Args:
        bits: There are 2**bits slots, of 65 bytes each. Twice as many as words are enough.
    """

    def __init__(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._last = (1 << bits) - 1
        self._keys = np.full((1 << bits, _LANES), -1, dtype=np.int64).view(np.uint64)  # empty: that of no word
        self._tokens = np.zeros((1 << bits, MOST_TOKENS), dtype=np.int32)
        self._counts = np.zeros(1 << bits, dtype=np.int8)
        self._len = 0
        padding = np.full((_WIDTH + 1, _WIDTH), _FILL, dtype=np.uint8)
        self._padding = np.triu(padding).view(np.uint64)  # by the number of a word's bytes

    def __len__(self) -> int:
        """Number of words."""
        return self._len

    def find(self, text: bytes, starts: Ints, lengths: Ints) -> Ints:
        """The slots of words of a text; -1 where one is not known.

        Args:
            starts, lengths: Of each word in bytes; at least one each.
        """
        keys = self._keys_of(text, starts, lengths)
        slots = self._slots_of(keys)
        same = self._keys.take(slots, axis=0) == keys
        if same.all():
            return slots
        rows = np.flatnonzero(~same.all(axis=1))
        tried = slots[rows]
        for _ in range(_PROBES - 1):
            tried = (tried + 1) & self._last
            found = (self._keys.take(tried, axis=0) == keys[rows]).all(axis=1)
            slots[rows[found]] = tried[found]
            rows, tried = rows[~found], tried[~found]
            if not len(rows):
                return slots
        slots[rows] = -1
        return slots

    def tokens(self, slots: Ints) -> tuple[Tokens, Ints]:
        """The tokens of the words in these slots, one word's after the other's; and how many each has."""
        counts = self._counts.take(slots).astype(np.int64)
        return self._tokens.reshape(-1).take(runs(slots * MOST_TOKENS, counts)), counts

    def add(self, words: Mapping[bytes, Sequence[int]]) -> None:
        """Remembers words of MOST_BYTES and one to MOST_TOKENS tokens."""
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        keys = self._keys_of(b"".join(words), np.cumsum(lengths) - lengths, lengths)
        for key, slot, tokens in zip(keys, self._slots_of(keys).tolist(), words.values(), strict=True):
            for probe in range(slot, slot + _PROBES):
                place = probe & self._last
                if not self._counts[place]:
                    self._keys[place], self._tokens[place, : len(tokens)] = key, tokens
                    self._counts[place] = len(tokens)
                    self._len += 1
                    break
                if (self._keys[place] == key).all():
                    break

    def _keys_of(self, text: bytes, starts: Ints, lengths: Ints) -> npt.NDArray[np.uint64]:
        """[words, _LANES] That of a longer word than MOST_BYTES is no other word's."""
        padded = text + bytes(_WIDTH)
        windows = np.ndarray((len(text) + 1,), f"V{_WIDTH}", padded, 0, (1,))  # one at each byte
        keys = windows[starts].view(np.uint64).reshape(-1, _LANES)  # a third of the time of `take`
        keys |= self._padding.take(lengths, axis=0, mode="clip")
        return keys

    def _slots_of(self, keys: npt.NDArray[np.uint64]) -> Ints:
        return ((keys @ _FACTORS) >> self._shift).astype(np.int64)


def runs(starts: Ints, counts: Ints) -> Ints:
    """The numbers `start .. start + count - 1` of each run, one run's after the other's."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)

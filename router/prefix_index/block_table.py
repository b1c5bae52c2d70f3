"""A map from 64-bit block hashes to small numbers, in flat memory.

With ten million entries a dict takes 80 bytes per entry, stops for half a second to grow, and misses the CPU's caches
three times in a row per lookup. This table takes 34 bytes per entry and grows in pieces, and numpy looks up a whole
chain at once, so that the cache misses overlap.

It is linear hashing (W. Litwin, VLDB 1980). A bucket has 8 slots. A round begins with `round` buckets, a power of two.
Bucket by bucket, the entries that have the next bit of their hash set move to a new bucket at the end, until there are
twice as many buckets. Entries for which a bucket has no room go to `_overflow`: less than 1 % of all.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 8

_SLOTS = 8
_BUCKET_BYTES = _SLOTS * KEY_BYTES
_FIRST_ROUND = 64
_MEAN_LOAD = 3
"""Buckets are split while they have more entries than this on average."""

_SPLIT_BUCKETS = 256
"""Buckets split at once, in about 0.1 ms."""

_ERASE_BUCKETS = 4096
"""Buckets erased from at once, in about 0.2 ms."""

_TOGETHER = 24
"""From this many changes on, array operations are faster than a loop."""

NO_KEY = bytes(KEY_BYTES)
"""Key of an empty slot. No block has this hash."""

Hashes = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]


class BlockTable:
    """Maps hashes other than 0 to numbers from 1 to 2**32 - 1; 0 means no entry. The memory never shrinks."""

    def __init__(self) -> None:
        # An empty slot has no key and the value 0.
        self._key_bytes = bytearray(_FIRST_ROUND * _BUCKET_BYTES)
        self._value_array = array("I", [0]) * (_FIRST_ROUND * _SLOTS)
        self._keys, self._values = self._views()
        self._overflow: dict[int, dict[int, int]] = {}  # by bucket and hash
        self._has_overflow = bytearray(_FIRST_ROUND)  # for each bucket, 1 if it has entries there
        self._round = _FIRST_ROUND
        self._split = 0  # buckets of this round that are already split
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def lacks(self, key: bytes) -> bool:
        """True if a hash (8 bytes) certainly has no entry. Ten times faster than `leading`."""
        number = int.from_bytes(key, "little")
        bucket = number & (self._round - 1)
        if bucket < self._split:
            bucket = number & (2 * self._round - 1)
        start, end = bucket * _BUCKET_BYTES, (bucket + 1) * _BUCKET_BYTES
        return self._key_bytes.find(key, start, end) < 0 and bucket not in self._overflow

    def leading(self, hashes: Hashes) -> list[int]:
        """Returns the values of these hashes, up to the first one without an entry."""
        buckets = self._buckets(hashes)
        same = self._keys.take(buckets, axis=0) == hashes[:, None]
        found: list[int] = self._values.take(buckets * _SLOTS + same.argmax(axis=1)).tolist()
        if np.count_nonzero(same) < len(found):
            for position in (~_any(same)).nonzero()[0].tolist():
                overflow = self._overflow.get(int(buckets[position]), {})
                found[position] = value = overflow.get(int(hashes[position]), 0)
                if value == 0:
                    return found[:position]
        return found

    def update(self, hashes: bytes, change: Mapping[int, int]) -> Counter[int]:
        """Sets the value of every hash (8 bytes each) to `change[value]`; 0 means no entry.

        Returns:
            The number of hashes that had each value before.
        """
        if len(hashes) < _TOGETHER * KEY_BYTES:
            before = self._update_each(hashes, change)
        else:
            before = self._update_together(np.frombuffer(hashes, dtype="<u8"), change)
        while self._len > _MEAN_LOAD * (self._round + self._split):
            self._split_some()
        return before

    def _update_together(self, hashes: Hashes, change: Mapping[int, int]) -> Counter[int]:
        """`_update_each` with array operations, where these give the same result."""
        buckets = self._buckets(hashes)
        keys, values = self._keys.reshape(-1), self._values
        there = self._keys.take(buckets, axis=0)
        same = there == hashes[:, None]
        known = _any(same)
        # the hash's own slot or an empty one; if the bucket has neither, its first one
        slots = buckets * _SLOTS + np.where(known, same.argmax(axis=1), (there == 0).argmax(axis=1))
        before = values.take(slots)
        # excluded: hashes whose slot an earlier one takes, whose bucket is full, or that are in the overflow
        order = np.arange(len(hashes), dtype=np.uint32)
        values[slots[::-1]] = order[::-1]  # the first one of a slot comes last
        alone = (values.take(slots) == order) & (known | (before == 0))
        values[slots] = before
        for position in np.frombuffer(self._has_overflow, np.bool_).take(buckets).nonzero()[0].tolist():
            if int(hashes[position]) in self._overflow[int(buckets[position])]:
                alone[position] = False
        others = b""
        if not alone.all():
            others = hashes[~alone].tobytes()
            hashes, slots, before = hashes[alone], slots[alone], before[alone]
        old = before.tolist()
        if old and old.count(old[0]) == len(old):  # usually
            counts = Counter({old[0]: len(old)})
            new = change[old[0]]
            keys[slots], values[slots] = hashes if new else 0, new
            self._len += (bool(new) - bool(old[0])) * len(old)
        else:
            counts = Counter(old)
            after = np.fromiter(map(change.__getitem__, old), dtype=np.uint32, count=len(old))
            keys[slots], values[slots] = np.where(after, hashes, 0), after
            self._len += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        if others:
            counts += self._update_each(others, change)
        return counts

    def _update_each(self, hashes: bytes, change: Mapping[int, int]) -> Counter[int]:
        before = []
        keys, values, overflow = self._key_bytes, self._value_array, self._overflow
        low_bits, high_bits, split = self._round - 1, 2 * self._round - 1, self._split
        for position, number in enumerate(memoryview(hashes).cast("Q")):
            bucket = number & low_bits
            if bucket < split:
                bucket = number & high_bits
            key = hashes[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            start, end = bucket * _BUCKET_BYTES, (bucket + 1) * _BUCKET_BYTES
            at = keys.find(key, start, end)
            while at >= 0 and at % KEY_BYTES:  # matches across two slots
                at = keys.find(key, at + 1, end)
            if at >= 0:
                slot = at // KEY_BYTES
                old = values[slot]
                values[slot] = new = change[old]
                if new == 0:
                    keys[at : at + KEY_BYTES] = NO_KEY
                    self._len -= 1
            else:
                old = self._take_overflow(bucket, number) if bucket in overflow else 0
                new = change[old]
                if new:
                    self._insert(bucket, number, new)
            before.append(old)
        return Counter(before)

    def erase(self, values: Sequence[int]) -> Iterator[None]:
        """Removes all entries with these values, one piece per step. None may be added meanwhile."""
        # by value; the last element stands for all larger values
        doomed = np.zeros(max(values, default=0) + 2, dtype=np.bool_)
        doomed[list(values)] = True
        start, end = 0, 0
        # a split between two steps moves entries upwards only, to buckets still to come
        while end < self._round + self._split:
            start, end = end, min(end + _ERASE_BUCKETS, self._round + self._split)
            keys, found = self._keys[start:end], self._values.reshape(-1, _SLOTS)[start:end]
            gone = doomed.take(found, mode="clip")
            keys[gone], found[gone] = 0, 0
            self._len -= int(np.count_nonzero(gone))
            del keys, found
            for bucket in [bucket for bucket in range(start, end) if bucket in self._overflow]:
                for number, value in list(self._overflow[bucket].items()):
                    if doomed.take(value, mode="clip"):
                        self._take_overflow(bucket, number)
            if end < self._round + self._split:
                yield

    def _buckets(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        buckets = hashes.view(np.int64) & (2 * self._round - 1)
        buckets -= (buckets >= self._round + self._split) * self._round
        return buckets

    def _views(self) -> tuple[Hashes, Values]:
        """Returns keys [buckets, slots] and values [buckets · slots]. Neither can grow while these views exist."""
        keys = np.frombuffer(self._key_bytes, dtype="<u8").reshape(-1, _SLOTS)
        return keys, np.frombuffer(self._value_array, dtype=np.uint32)

    def _insert(self, bucket: int, number: int, value: int) -> None:
        try:
            slot = self._value_array.index(0, bucket * _SLOTS, (bucket + 1) * _SLOTS)
        except ValueError:
            self._overflow.setdefault(bucket, {})[number] = value
            self._has_overflow[bucket] = 1
        else:
            self._key_bytes[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = number.to_bytes(KEY_BYTES, "little")
            self._value_array[slot] = value
        self._len += 1

    def _take_overflow(self, bucket: int, number: int) -> int:
        """Removes an entry and returns its value; 0 if there is none."""
        entries = self._overflow[bucket]
        value = entries.pop(number, 0)
        self._len -= value > 0
        if not entries:
            del self._overflow[bucket]
            self._has_overflow[bucket] = 0
        return value

    def _split_some(self) -> None:
        first, last = self._split, min(self._split + _SPLIT_BUCKETS, self._round)
        del self._keys, self._values
        self._key_bytes += bytes((last - first) * _BUCKET_BYTES)
        self._value_array.frombytes(bytes((last - first) * _SLOTS * self._value_array.itemsize))
        self._has_overflow += bytes(last - first)
        self._keys, self._values = self._views()
        keys, values = self._keys, self._values.reshape(-1, _SLOTS)
        target = slice(self._round + first, self._round + last)
        moves = (keys[first:last] & self._round) != 0
        for slots in (keys, values):
            slots[target] = np.where(moves, slots[first:last], 0)
            slots[first:last][moves] = 0
        del keys, values, slots
        self._has_overflow[first:last] = bytes(last - first)
        for bucket in range(first, last):
            for number, value in self._overflow.pop(bucket, {}).items():
                self._insert(bucket + (number & self._round), number, value)
                self._len -= 1
        self._split = last
        if last == self._round:
            self._round, self._split = 2 * self._round, 0


def _any(slots: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns for each bucket whether any slot is set. [buckets, slots] -> [buckets]"""
    some: npt.NDArray[np.bool_] = slots.view(np.uint64).ravel() != 0
    return some

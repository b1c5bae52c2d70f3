"""A mapping of limited size that drops the least recently used entries."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Holds entries with a total size of at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Total size of all entries."""
        return self._size

    def get(self, key: K) -> V | None:
        """The value of a key; None if it is not (or no longer) there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Stores a value of this size, unless it is larger than the capacity."""
        if key in self._entries:
            self._size -= self._entries.pop(key)[1]
        self._entries[key] = (value, size)
        self._size += size
        while self._size > self._capacity:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._size -= dropped

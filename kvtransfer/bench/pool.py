"""The pools of a measurement."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpd.common.errors import TransferError
from kvtransfer import cuda
from kvtransfer.base import PoolMemory

FILLING = 1
_LOOKED_AT = 1021  # of each page every so many bytes


class BenchPool:
    """Pages of plain memory, all of it touched.

    Args:
        num_pages: How many.
        page_bytes: Of a page.
        filling: Every byte.
        device: See `PoolMemory`.

    Raises:
        TransferError: The device has no such memory.
    """

    def __init__(self, num_pages: int, page_bytes: int, filling: int = 0, device: int | None = None) -> None:
        if device is None:
            self._pages = np.full((num_pages, page_bytes), filling, np.uint8)
            pointer = self._pages.ctypes.data
        else:
            pointer = cuda.allocate(device, num_pages * page_bytes)
            cuda.fill(device, pointer, filling, num_pages * page_bytes)
        self.memory = PoolMemory(pointer, num_pages, page_bytes, device)

    def take(self, pages: Sequence[int], filling: int) -> None:
        """Looks at pages that have arrived, and clears what it looks at. Raises TransferError if one is wrong."""
        for page in pages:
            if not (self._look(page) == filling).all():
                raise TransferError("a page arrived damaged")
            self._clear(page)

    def close(self) -> None:
        """Gives the memory back; no transport may be using it."""
        if self.memory.device is not None:
            cuda.free(self.memory.device, self.memory.pointer)

    def _look(self, page: int) -> NDArray[np.uint8]:
        memory = self.memory
        if memory.device is None:
            return self._pages[page, ::_LOOKED_AT]
        copy = cuda.read(memory.device, memory.pointer + page * memory.page_bytes, memory.page_bytes)
        return np.frombuffer(copy, np.uint8)[::_LOOKED_AT]

    def _clear(self, page: int) -> None:
        memory = self.memory
        if memory.device is None:
            self._pages[page, ::_LOOKED_AT] = 0
        else:
            cuda.fill(memory.device, memory.pointer + page * memory.page_bytes, 0, memory.page_bytes)


def choose(num_pages: int, count: int, *, scattered: bool) -> list[int]:
    """`count` different pages of a pool, anywhere or side by side."""
    if scattered:
        return random.sample(range(num_pages), count)
    first = random.randrange(num_pages - count + 1)
    return list(range(first, first + count))

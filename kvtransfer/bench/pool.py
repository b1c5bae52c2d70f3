"""The pools of a measurement."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpd.common.errors import TransferError
from kvtransfer import cuda
from kvtransfer.base import PoolMemory

CONTENT = 1
"""Every byte of the sender's pages."""

_CHECK_STEP = 1021  # distance of the bytes that are checked


class BenchPool:
    """A pool in plain memory, all of it touched.

    Args:
        num_pages: Number of pages.
        page_bytes: Page size.
        content: Value of every byte.
        device: See `PoolMemory`.

    Raises:
        TransferError: The device has not enough memory.
    """

    def __init__(self, num_pages: int, page_bytes: int, content: int = 0, device: int | None = None) -> None:
        if device is None:
            self._pages = np.full((num_pages, page_bytes), content, np.uint8)
            pointer = self._pages.ctypes.data
        else:
            pointer = cuda.allocate(device, num_pages * page_bytes)
            cuda.fill(device, pointer, content, num_pages * page_bytes)
        self.memory = PoolMemory(pointer, num_pages, page_bytes, device)

    def check_and_clear(self, pages: Sequence[int], content: int) -> None:
        """Checks some bytes of pages that have arrived, and clears them. Raises TransferError if one is wrong."""
        for page in pages:
            if not (self._sample(page) == content).all():
                raise TransferError("a page arrived damaged")
            self._clear(page)

    def close(self) -> None:
        """Frees the memory; no transport may be using it."""
        if self.memory.device is not None:
            cuda.free(self.memory.device, self.memory.pointer)

    def _sample(self, page: int) -> NDArray[np.uint8]:
        memory = self.memory
        if memory.device is None:
            return self._pages[page, ::_CHECK_STEP]
        copy = cuda.read(memory.device, memory.pointer + page * memory.page_bytes, memory.page_bytes)
        return np.frombuffer(copy, np.uint8)[::_CHECK_STEP]

    def _clear(self, page: int) -> None:
        memory = self.memory
        if memory.device is None:
            self._pages[page, ::_CHECK_STEP] = 0
        else:
            cuda.fill(memory.device, memory.pointer + page * memory.page_bytes, 0, memory.page_bytes)


def choose(num_pages: int, count: int, *, scattered: bool) -> list[int]:
    """`count` different pages of a pool, scattered or contiguous."""
    if scattered:
        return random.sample(range(num_pages), count)
    first = random.randrange(num_pages - count + 1)
    return list(range(first, first + count))

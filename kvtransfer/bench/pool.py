"""The pools of a measurement."""

import random
from collections.abc import Sequence

import numpy as np

from cpd.errors import TransferError
from kvtransfer.base import PoolMemory

FILLING = 1
_LOOKED_AT = 1021  # of each page every so many bytes


class BenchPool:
    """Pages of plain memory, all of it touched.

    Args:
        num_pages: How many.
        page_bytes: Of a page.
        filling: Every byte.
    """

    def __init__(self, num_pages: int, page_bytes: int, filling: int = 0) -> None:
        self._pages = np.full((num_pages, page_bytes), filling, np.uint8)
        self.memory = PoolMemory(self._pages.ctypes.data, num_pages, page_bytes)

    def take(self, pages: Sequence[int], filling: int) -> None:
        """Looks at pages that have arrived, and clears what it looks at. Raises TransferError if one is wrong."""
        seen = self._pages[:, ::_LOOKED_AT]
        if not (seen[list(pages)] == filling).all():
            raise TransferError("a page arrived damaged")
        seen[list(pages)] = 0


def choose(num_pages: int, count: int, *, scattered: bool) -> list[int]:
    """`count` different pages of a pool, anywhere or side by side."""
    if scattered:
        return random.sample(range(num_pages), count)
    first = random.randrange(num_pages - count + 1)
    return list(range(first, first + count))

"""A copy of weights in a file in memory (memfd).

The file is not mapped, so the copy does not count as resident memory of the process; it does count for its container.
"""

import mmap
import os

import numpy as np

from engine.execution.cpu import system_memory
from engine.execution.cpu.system_memory import Bytes

_RANGE_BYTES = 32 << 20


class StagedCopy:
    """An open file of `num_bytes`. Several threads may read and write different parts of it.

    Raises:
        OSError: There is too little memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file = os.memfd_create("cpd-weights", os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, num_bytes)
            self._allocate()
        except BaseException:
            self.close()
            raise

    def write(self, content: Bytes, offset: int) -> None:
        """Writes bytes at an offset."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self._file, left, offset)
            left, offset = left[count:], offset + count

    def read(self, content: Bytes, offset: int) -> None:
        """Fills `content` with the bytes at an offset."""
        left = memoryview(content)
        while left:
            count = os.preadv(self._file, [left], offset)
            left, offset = left[count:], offset + count

    def close(self) -> None:
        """Frees the memory."""
        os.close(self._file)

    def _allocate(self) -> None:
        """Takes the memory, in huge pages where the system has some: they are read faster."""
        memory = np.frombuffer(mmap.mmap(self._file, self.num_bytes), np.uint8)  # unmapped with the array
        system_memory.in_huge_pages(memory)
        for start in range(0, self.num_bytes, _RANGE_BYTES):
            system_memory.populate(memory[start : start + _RANGE_BYTES])

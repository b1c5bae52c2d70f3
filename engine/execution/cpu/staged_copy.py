"""A copy of weights in a file in memory (memfd).

The file is mapped only while it is read, so that it is no resident memory of the process. It counts for the container.
"""

import mmap
import os

import numpy as np

from engine.execution.cpu import system_memory
from engine.execution.cpu.system_memory import Bytes

_RANGE_BYTES = 32 << 20


class StagedCopy:
    """An open file of `num_bytes`.

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
        left = content.data
        while left:
            count = os.pwrite(self._file, left, offset)
            left, offset = left[count:], offset + count

    def content(self) -> Bytes:
        """Returns its bytes, which are mapped as long as the array exists."""
        memory = np.frombuffer(mmap.mmap(self._file, self.num_bytes, prot=mmap.PROT_READ), np.uint8)
        system_memory.in_huge_pages(memory)
        return memory

    def close(self) -> None:
        """Frees the memory."""
        os.close(self._file)

    def _allocate(self) -> None:
        """Takes the memory, in huge pages where the system has some: they are read faster."""
        memory = np.frombuffer(mmap.mmap(self._file, self.num_bytes), np.uint8)  # unmapped with the array
        system_memory.in_huge_pages(memory)
        for start in range(0, self.num_bytes, _RANGE_BYTES):
            system_memory.populate(memory[start : start + _RANGE_BYTES])

"""What the operating system does with a part of this process's memory. All functions release the GIL.

They take an array of bytes and act on whole memory pages: those inside it, so that nothing beside it changes.
"""

import ctypes
import errno
import mmap
import os
from functools import cache

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES = 2 << 20
"""On x86-64, and on ARM with small pages of 4 KiB."""

_MADV_POPULATE_WRITE = 23
"""https://man7.org/linux/man-pages/man2/madvise.2.html; since Linux 5.14."""


def own(num_bytes: int) -> Bytes:
    """Returns new memory of zeros, from the beginning of a huge page on. It is not resident yet.

    Raises:
        OSError: The system has no room for it.
    """
    memory = _new(num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory = memory[start : start + num_bytes]
    in_huge_pages(memory)
    return memory


def shared(num_bytes: int) -> Bytes:
    """The same, but the system counts it as shared (`RssShmem`), apart from what is the process's own."""
    memory = _new(num_bytes, mmap.MAP_SHARED)
    in_huge_pages(memory)
    return memory


def release(memory: Bytes) -> None:
    """Gives memory of its own (not shared, not of a file) back to the system. Its content becomes zeros."""
    _advise(memory, mmap.MADV_DONTNEED)


def release_shared(memory: Bytes) -> None:
    """Gives shared memory back to the system. Its content becomes zeros."""
    _advise(memory, mmap.MADV_REMOVE)


def trim() -> None:
    """Gives freed memory that the C library keeps (glibc does) back to the system."""
    if keeps := getattr(_libc(), "malloc_trim", None):
        keeps(0)


def in_huge_pages(memory: Bytes) -> None:
    """Asks for huge pages from now on, where the system has some."""
    try:
        _advise(memory, mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # it has none
            raise


def populate(memory: Bytes) -> None:
    """Makes memory resident, so that nobody waits for it later. Others may use it meanwhile.

    Raises:
        OSError: The system has too little memory.
    """
    try:
        _advise(memory, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: it becomes resident when it is used
            raise


def resident_bytes(memory: Bytes) -> int:
    """Returns how much is resident now."""
    start, size = _inside(memory)
    if not size:
        return 0
    flags = np.zeros(size // mmap.PAGESIZE, np.uint8)
    _check(_libc().mincore(start, size, flags.ctypes.data))
    return int(np.count_nonzero(flags & 1)) * mmap.PAGESIZE


def _new(num_bytes: int, kind: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=kind | mmap.MAP_ANONYMOUS), np.uint8)


def _advise(memory: Bytes, advice: int) -> None:
    start, size = _inside(memory)
    if size:
        _check(_libc().madvise(start, size, advice))


def _inside(memory: Bytes) -> tuple[int, int]:
    """The address and the size of the whole pages in an array."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return first, max(0, last - first)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return libc

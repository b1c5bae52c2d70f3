"""Writing into another process of this machine: the kernel copies, many runs of pages a system call.

UCX can have the kernel copy, too, but it makes a system call for each page and keeps track of each. In pages of 16 KiB
that is half of the time.
"""

import ctypes
import errno
import itertools
import os
import select

import numpy as np
from numpy.typing import NDArray

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.nixl.writer import Pages

_VECTORS = (ctypes.c_void_p, ctypes.c_ulong)
_IOV_MAX = 1024
_GONE = "the connection was reset: the peer is gone"
_NOWHERE = 4096  # an address at which no process has memory


class ForbiddenError(TransferError):
    """The kernel does not let this process write into that one."""


class Neighbour:
    """Another process's pool, written into by the calling thread (implements `kvtransfer.nixl.writer.Door`).

    Args:
        own: The pool to read.
        process: The other process.
        theirs: Its pool.

    Raises:
        ForbiddenError: The kernel does not let this process write there.
        TransferError: The process is gone.
    """

    def __init__(self, own: PoolMemory, process: ProcessIdentity, theirs: PoolMemory) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._copy = library.process_vm_writev
        self._copy.restype = ctypes.c_ssize_t
        self._copy.argtypes = [ctypes.c_int, *_VECTORS, *_VECTORS, ctypes.c_ulong]
        self._own = own
        self._theirs = theirs
        self._pid = process.pid
        self._handles = itertools.count()
        pidfd = process.open()
        if pidfd is None:
            raise TransferError(_GONE)
        self._pidfd = pidfd
        self._gone = select.poll()
        self._gone.register(pidfd, select.POLLIN)
        try:
            self._may_write()
        except TransferError:
            self.close()
            raise

    def write(self, own: Pages, theirs: Pages, counts: Pages) -> int:
        """Writes own pages `own[k]`, `own[k] + 1`, … to their `theirs[k]`, …, `counts[k]` of them, for every k.

        Raises:
            TransferError: The process is gone.
        """
        local, remote = _vectors(self._own, own, counts), _vectors(self._theirs, theirs, counts)
        for first in range(0, len(local), _IOV_MAX):
            self._write(local[first : first + _IOV_MAX], remote[first : first + _IOV_MAX])
        return next(self._handles)

    def written(self, handle: int) -> bool:
        """Always: `write` returns when it is."""
        return True

    def close(self) -> None:
        os.close(self._pidfd)

    def _may_write(self) -> None:
        source, target = np.array([[self._own.pointer, 1]], np.uint64), np.array([[_NOWHERE, 1]], np.uint64)
        _, problem = self._call(source, target)  # fails, but the kernel asks for permission first
        if problem != errno.EFAULT:
            raise ForbiddenError(f"processes may not write into each other's memory here: {os.strerror(problem)}")

    def _write(self, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
        if self._gone.poll(0):  # its number may be another process's by now
            raise TransferError(_GONE)
        expected = int(local[:, 1].sum())
        written, problem = self._call(local, remote)
        if written != expected:
            if problem == errno.ESRCH:
                raise TransferError(_GONE)
            raise TransferError(
                f"{max(written, 0)} of {expected} bytes were written into the peer's memory: {os.strerror(problem)}"
            )

    def _call(self, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> tuple[int, int]:
        """The bytes copied, and the error number."""
        ctypes.set_errno(0)
        arguments = (local.ctypes.data, len(local), remote.ctypes.data, len(remote))
        written = self._copy(self._pid, *arguments, 0)
        return written, ctypes.get_errno()


def _vectors(pool: PoolMemory, pages: Pages, counts: Pages) -> NDArray[np.uint64]:
    """The kernel's list of runs of pages, an array of struct iovec: [runs, (pointer, bytes)]."""
    vectors = np.empty((len(pages), 2), np.uint64)
    vectors[:, 0] = pool.pointer + pages.astype(np.uint64) * np.uint64(pool.page_bytes)
    vectors[:, 1] = counts * pool.page_bytes
    return vectors

"""Writes into another process of this machine: the kernel copies, many pieces of memory in one system call.

UCX can have the kernel copy, too, but makes and tracks a system call for each page. With pages of 16 KiB that takes
half of the time.
"""

import ctypes
import errno
import itertools
import os
import select

import numpy as np

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.segments import Addresses

_VECTORS = (ctypes.c_void_p, ctypes.c_ulong)
_IOV_MAX = 1024
_GONE = "the connection was reset: the peer is gone"
_UNMAPPED = 4096  # an address at which no process has memory


class ForbiddenError(TransferError):
    """The kernel does not let this process write into the other one."""


class SameHostBackend:
    """Writes into another process's memory on the calling thread (implements `kvtransfer.nixl.writer.WriterBackend`).

    Args:
        process: The other process.
        readable: Address of own memory, to ask for permission.

    Raises:
        ForbiddenError: The kernel does not let this process write there.
        TransferError: The process has ended; so do all methods.
    """

    def __init__(self, process: ProcessIdentity, readable: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._copy = library.process_vm_writev
        self._copy.restype = ctypes.c_ssize_t
        self._copy.argtypes = [ctypes.c_int, *_VECTORS, *_VECTORS, ctypes.c_ulong]
        self._pid = process.pid
        self._handles = itertools.count()
        pidfd = process.open()
        if pidfd is None:
            raise TransferError(_GONE)
        self._pidfd = pidfd
        self._ended = select.poll()
        self._ended.register(pidfd, select.POLLIN)
        try:
            self._check_permission(readable)
        except TransferError:
            self.close()
            raise

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses) -> int:
        own, theirs = np.stack([sources, num_bytes], axis=1), np.stack([targets, num_bytes], axis=1)
        for first in range(0, len(own), _IOV_MAX):
            self._write(own[first : first + _IOV_MAX], theirs[first : first + _IOV_MAX])
        return next(self._handles)

    def written(self, handle: int) -> bool:
        """Always true: `write` returns when it is done."""
        return True

    def close(self) -> None:
        os.close(self._pidfd)

    def _check_permission(self, readable: int) -> None:
        own, theirs = np.array([[readable, 1]], np.uint64), np.array([[_UNMAPPED, 1]], np.uint64)
        _, problem = self._call(own, theirs)  # fails, but the kernel checks the permission first
        if problem != errno.EFAULT:
            raise ForbiddenError(f"processes may not write into each other's memory here: {os.strerror(problem)}")

    def _write(self, own: Addresses, theirs: Addresses) -> None:
        if self._ended.poll(0):  # its process ID may be another process's by now
            raise TransferError(_GONE)
        expected = int(own[:, 1].sum())
        written, problem = self._call(own, theirs)
        if written != expected:
            if problem == errno.ESRCH:
                raise TransferError(_GONE)
            raise TransferError(
                f"{max(written, 0)} of {expected} bytes were written into the peer's memory: {os.strerror(problem)}"
            )

    def _call(self, own: Addresses, theirs: Addresses) -> tuple[int, int]:
        """Copies between arrays of struct iovec, [pieces, (pointer, bytes)]. Returns the bytes copied and the errno."""
        ctypes.set_errno(0)
        written = self._copy(self._pid, own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)
        return written, ctypes.get_errno()

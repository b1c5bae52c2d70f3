"""One-sided writes, which UCX's C interface has and ucxx's Python interface lacks.

A receiver opens its pool to its peers with a key. Whoever has a connection and the key writes into the pool; UCX at the
receiver puts the bytes in place as they arrive, without a buffer (over TCP the kernel copies straight into the page).

UCX trusts keys: bytes that are not a key crash the process that unpacks them. Only a transport of the same protocol
version answers with one.

Make all calls on the reactor's thread.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory

_IN_PROGRESS = 1
_FIRST_ERROR = (1 << 64) - 100  # from here on it is a status, not a request: UCX's errors are -1 to -100
_MAP_FIELDS = 0b11  # address and length are set


class _MapParameters(Structure):  # ucp_mem_map_params_t
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )


class _RequestParameters(Structure):  # ucp_request_param_t, all zero
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("rest", c_uint64 * 16),
    )


class Ucp:
    """The UCX library that ucxx has loaded."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libucp.so.0")

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        self.map = function("ucp_mem_map", c_int, c_void_p, POINTER(_MapParameters), POINTER(c_void_p))
        self.unmap = function("ucp_mem_unmap", c_int, c_void_p, c_void_p)
        self.pack = function("ucp_rkey_pack", c_int, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t))
        self.release = function("ucp_rkey_buffer_release", None, c_void_p)
        self.unpack = function("ucp_ep_rkey_unpack", c_int, c_void_p, c_char_p, POINTER(c_void_p))
        self.destroy = function("ucp_rkey_destroy", None, c_void_p)
        self.put = function(
            "ucp_put_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParameters)
        )
        self.flush = function("ucp_ep_flush_nbx", c_void_p, c_void_p, POINTER(_RequestParameters))
        self.status = function("ucp_request_check_status", c_int, c_void_p)
        self.free = function("ucp_request_free", None, c_void_p)
        self.parameters = _RequestParameters()


class Write:
    """A request to UCX, a put or a flush. Has the attributes of ucxx's requests."""

    __slots__ = ("_request", "_status", "_ucp")

    def __init__(self, ucp: Ucp, request: int | None) -> None:
        self._ucp = ucp
        self._request: int | None = None
        self._status = 0
        if request is None:
            return
        if request >= _FIRST_ERROR:
            self._status = request - (1 << 64)
        else:
            self._request, self._status = request, _IN_PROGRESS

    @property
    def completed(self) -> bool:
        if self._request is not None:
            self._status = self._ucp.status(self._request)
            if self._status != _IN_PROGRESS:
                self._ucp.free(self._request)
                self._request = None
        return self._request is None

    def check_error(self) -> None:
        """Raises TransferError if it failed."""
        if self._status < 0:
            raise TransferError(f"a write failed, UCX's error {self._status}")


class OpenMemory:
    """A pool that peers may write into (the receiver's end).

    Attributes:
        key: What a peer needs to write.

    Raises:
        TransferError: UCX can't map it.
    """

    def __init__(self, ucp: Ucp, context: int, pointer: int, num_bytes: int) -> None:
        self._ucp = ucp
        self._context = context
        self._handle = c_void_p()
        parameters = _MapParameters(_MAP_FIELDS, pointer, num_bytes)
        _check(ucp.map(context, byref(parameters), byref(self._handle)))
        packed, size = c_void_p(), c_size_t()
        _check(ucp.pack(context, self._handle, byref(packed), byref(size)))
        assert packed.value is not None
        self.key = pointer.to_bytes(8, "little") + ctypes.string_at(packed.value, size.value)
        ucp.release(packed)

    def close(self) -> None:
        """Unmaps the pool. All connections must be gone."""
        self._ucp.unmap(self._context, self._handle)


class PeersMemory:
    """A peer's pool, over an open connection (the sender's end).

    Attributes:
        pool: Where it lies in the peer's memory. Its number of pages is unknown.

    Args:
        key: `OpenMemory.key` of the peer.
        page_bytes: Page size of the pool.

    Raises:
        TransferError: UCX finds no way to the pool.
    """

    def __init__(self, ucp: Ucp, endpoint: int, key: bytes, page_bytes: int) -> None:
        self.pool = PoolMemory(int.from_bytes(key[:8], "little"), 0, page_bytes)
        self._ucp = ucp
        self._endpoint = endpoint
        self._key = c_void_p()
        _check(ucp.unpack(endpoint, key[8:], byref(self._key)))

    def write(self, source: int, target: int, num_bytes: int) -> Write:
        """Starts to write own bytes to an address of the peer. They must not change until the write is completed."""
        ucp = self._ucp
        return Write(ucp, ucp.put(self._endpoint, source, num_bytes, target, self._key, byref(ucp.parameters)))

    def flush(self) -> Write:
        """Starts a request that completes when all earlier writes are in the peer's pool."""
        return Write(self._ucp, self._ucp.flush(self._endpoint, byref(self._ucp.parameters)))

    def close(self) -> None:
        """Frees the key. All writes must be completed."""
        self._ucp.destroy(self._key)


def _check(status: int) -> None:
    if status != 0:
        raise TransferError(f"UCX's error {status}")

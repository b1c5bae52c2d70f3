"""One-sided writes: what UCX's C interface has and ucxx's Python one has not.

A receiver's pool is opened to its peers by a key. Who has a connection and the key writes into the pool; UCX at the
receiver then puts the bytes where they belong as they come, with no buffer between (over TCP: the kernel's copy goes
straight into the page).

UCX believes a key: one that is none crashes the process that unpacks it. So a key travels sealed with the secret of the
receiver's address.

All calls are for the reactor's thread.
"""

import ctypes
import hmac
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from cpd.common.errors import TransferError

_IN_PROGRESS = 1
_FIRST_ERROR = (1 << 64) - 100  # a status in place of a request: UCX's errors are -1 to -100
_MAP_FIELDS = 0b11  # address and length are given
_SEAL_BYTES = 16


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


class _RequestParameters(Structure):  # ucp_request_param_t; nothing of it is used
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("rest", c_uint64 * 16),
    )


class Ucp:
    """UCX's library, the one that ucxx has loaded."""

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
    """A request that UCX has been given: a put or a flush. As ucxx's requests are asked."""

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


def seal(key: bytes, secret: bytes) -> bytes:
    """A key for the way to a peer.

    Args:
        secret: From the address of the transport that it is a key of.
    """
    return hmac.digest(secret, key, "sha256")[:_SEAL_BYTES] + key


def unseal(sealed: bytes, secret: bytes) -> bytes:
    """The key that `seal` was given.

    Raises:
        TransferError: It was not sealed with this secret.
    """
    key = sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(seal(key, secret), sealed):
        raise TransferError(
            "the receiver sent no key of its pool: another program, or another version, is at its address"
        )
    return key


class OpenMemory:
    """A pool that peers may write into (the receiver's end).

    Attributes:
        key: What a peer needs for it.

    Raises:
        TransferError: UCX can't.
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
        """Nobody may write any more: for the time when all connections are gone."""
        self._ucp.unmap(self._context, self._handle)


class PeersMemory:
    """A peer's pool, over a connection that is open (the sender's end).

    Args:
        key: Unsealed, as `OpenMemory.key` was.

    Raises:
        TransferError: UCX finds no way to the pool.
    """

    def __init__(self, ucp: Ucp, endpoint: int, key: bytes) -> None:
        self._ucp = ucp
        self._endpoint = endpoint
        self._pointer = int.from_bytes(key[:8], "little")
        self._key = c_void_p()
        _check(ucp.unpack(endpoint, key[8:], byref(self._key)))

    def write(self, pointer: int, num_bytes: int, offset: int) -> Write:
        """Has own bytes written `offset` bytes into the peer's pool. They must not change until it is completed."""
        ucp = self._ucp
        place = self._pointer + offset
        return Write(ucp, ucp.put(self._endpoint, pointer, num_bytes, place, self._key, byref(ucp.parameters)))

    def flush(self) -> Write:
        """Completes when all that was written before is in the peer's pool."""
        return Write(self._ucp, self._ucp.flush(self._endpoint, byref(self._ucp.parameters)))

    def close(self) -> None:
        """For the time when all writes are completed."""
        self._ucp.destroy(self._key)


def _check(status: int) -> None:
    if status != 0:
        raise TransferError(f"UCX's error {status}")

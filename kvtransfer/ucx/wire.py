"""What two UCX transports say to each other beside the pages: frames of one fixed size, and the address.

    sender                              receiver
    Hello(key, page size)       ──▶
                                ◀──     Welcome | Reject(reason)         once a connection
    Offer(batch, ticket, runs)  ──▶
                                ◀──     Grant(batch, tag) | Refuse(batch, reason)
    run k with tag + k          ══▶     into the pages, receives already posted
                                ◀──     Done(batch)                      every run has arrived

An offer is a promise: what was granted is sent completely, or the connection breaks. Nothing of a peer is trusted:
a frame that does not parse raises TransferError, and the connection is given up.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from cpd.errors import StaleTransferError, TransferError
from kvtransfer import addresses
from kvtransfer.addresses import KEY_BYTES

FRAME_BYTES = 1024
MAX_RUNS = 96  # in one offer
_MAX_TEXT = 512

_VERSION = 1
_HEAD = struct.Struct("<BxH")  # kind, length of the rest
_HELLO = struct.Struct(f"<B{KEY_BYTES}sQ")
_OFFER = struct.Struct("<QQQQ")
_RUN = struct.Struct("<II")
_GRANT = struct.Struct("<QQ")
_REFUSE = struct.Struct("<Q?")
_REJECT = struct.Struct("<?")
_DONE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection: the key from the receiver's address, and the sender's page size."""

    key: bytes
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The connection will not be used."""

    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks to send these runs, (index, count) into the ticket's pages, one message each."""

    batch: int
    epoch: int
    reservation: int
    generation: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Receives are posted: run k is expected with tag + k."""

    batch: int
    tag: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of the batch will be received."""

    batch: int
    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every run of the batch has arrived."""

    batch: int


Frame = Hello | Welcome | Reject | Offer | Grant | Refuse | Done


def encode(frame: Frame) -> bytearray:
    """A frame of FRAME_BYTES."""
    rest = _encode_rest(frame)
    return bytearray((_HEAD.pack(_KINDS.index(type(frame)), len(rest)) + rest).ljust(FRAME_BYTES, b"\0"))


def _encode_rest(frame: Frame) -> bytes:
    match frame:
        case Hello():
            return _HELLO.pack(_VERSION, frame.key, frame.page_bytes)
        case Welcome():
            return b""
        case Reject():
            return _REJECT.pack(frame.stale) + _text(frame.reason)
        case Offer():
            ticket = _OFFER.pack(frame.batch, frame.epoch, frame.reservation, frame.generation)
            return ticket + b"".join(_RUN.pack(*run) for run in frame.runs)
        case Grant():
            return _GRANT.pack(frame.batch, frame.tag)
        case Refuse():
            return _REFUSE.pack(frame.batch, frame.stale) + _text(frame.reason)
        case Done():
            return _DONE.pack(frame.batch)


def _text(reason: str) -> bytes:
    return reason.encode(errors="replace")[:_MAX_TEXT]


def decode(data: bytes | bytearray) -> Frame:
    """The frame in `data`.

    Raises:
        TransferError: It is none.
    """
    try:
        kind, length = _HEAD.unpack_from(data)
        rest = bytes(data[_HEAD.size : _HEAD.size + length])
        if len(data) != FRAME_BYTES or len(rest) != length:
            raise TransferError(f"a frame of {len(data)} bytes claims to hold {length}")
        return _DECODERS[_KINDS[kind]](rest)
    except (struct.error, IndexError):
        raise TransferError("the peer sent a malformed frame") from None


def _hello(rest: bytes) -> Hello:
    version, key, page_bytes = _HELLO.unpack(rest)
    if version != _VERSION:
        raise TransferError(f"the peer speaks version {version} of the transfer protocol, this worker {_VERSION}")
    return Hello(key, page_bytes)


def _offer(rest: bytes) -> Offer:
    batch, epoch, reservation, generation = _OFFER.unpack_from(rest)
    return Offer(batch, epoch, reservation, generation, tuple(_RUN.iter_unpack(rest[_OFFER.size :])))


def _reject(rest: bytes) -> Reject:
    (stale,) = _REJECT.unpack_from(rest)
    return Reject(stale, rest[_REJECT.size :].decode(errors="replace"))


def _refuse(rest: bytes) -> Refuse:
    batch, stale = _REFUSE.unpack_from(rest)
    return Refuse(batch, stale, rest[_REFUSE.size :].decode(errors="replace"))


_DECODERS: dict[type[Frame], Callable[[bytes], Frame]] = {
    Hello: _hello,
    Welcome: lambda _: Welcome(),
    Reject: _reject,
    Offer: _offer,
    Grant: lambda rest: Grant(*_GRANT.unpack(rest)),
    Refuse: _refuse,
    Done: lambda rest: Done(*_DONE.unpack(rest)),
}
_KINDS = tuple(_DECODERS)  # a frame's kind on the wire is its place here


def refusal(stale: bool, reason: str) -> TransferError:
    """The error that a Reject or Refuse means."""
    return StaleTransferError(reason) if stale else TransferError(reason)


class Address(addresses.Address):
    """Of a ucx transport."""

    __slots__ = ()
    MAGIC = b"cpdu"
    TRANSPORT = "ucx"

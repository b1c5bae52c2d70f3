"""What two transports say to each other beside the pages.

    sender                              receiver
    Hello(key, page size, details) ──▶
                                   ◀──  Welcome(details) | Reject(reason)                       once a connection
    Offer(batch, ticket, runs)     ──▶
                                   ◀──  Grant(batch, places) | Refuse(batch, reason)
    the pages                      ══▶  to the places granted
    Sent(batch)                    ──▶                                   where the receiver can't see pages arrive
                                   ◀──  Done(batch)                      the landing knows that they have arrived
                                   ◀──  Stop(reason)                     send no more

What was granted is sent completely, or the connection ends. Where that does not end the sending too, the sender tells
the receiver afterwards, over a connection of its own and until it has been heard:

    Over(key, connection)          ──▶                                   nothing is being sent over that one any more
                                   ◀──  Heard | Reject(reason)

Nothing of a peer is trusted: a frame that does not parse raises TransferError, and the connection is given up.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.addresses import KEY_BYTES

MAX_FRAME_BYTES = 1 << 20
PREFIX_BYTES = 4
CONNECTION_BYTES = 16

_VERSION = 6
_MAX_TEXT = 512
_PREFIX = struct.Struct("<I")
_HELLO = struct.Struct(f"<B{KEY_BYTES}sQ")
_OFFER = struct.Struct("<QQQQ")
_RUN = struct.Struct("<II")
_BATCH = struct.Struct("<Q")
_REFUSE = struct.Struct("<Q?")
_REJECT = struct.Struct("<?")
_OVER = struct.Struct(f"<{KEY_BYTES}s{CONNECTION_BYTES}s")


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection: the key from the receiver's address, the sender's page size, what its transport adds."""

    key: bytes
    page_bytes: int
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open."""

    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Reject:
    """The connection will not be used."""

    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks to send these runs, (index, count) into the ticket's pages."""

    batch: int
    epoch: int
    reservation: int
    generation: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The batch may be sent: run k to `places[k]`, a page of the receiver's pool or a message's tag."""

    batch: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of the batch may be sent."""

    batch: int
    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Every page of the batch has arrived."""

    batch: int


@dataclass(frozen=True, slots=True)
class Done:
    """The landing knows that the batch has arrived."""

    batch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The receiver gives the connection up: send no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing is being sent any more over another connection of this sender's, or will be.

    Attributes:
        key: From the receiver's address.
        connection: The secret name that its sender gave it when it was opened.
    """

    key: bytes
    connection: bytes


@dataclass(frozen=True, slots=True)
class Heard:
    """The receiver knows that it is over."""


Frame = Hello | Welcome | Reject | Offer | Grant | Refuse | Sent | Done | Stop | Over | Heard


def encode(frame: Frame) -> bytes:
    """A frame with its length before it."""
    rest = _encode_rest(frame)
    return _PREFIX.pack(1 + len(rest)) + bytes([_KINDS.index(type(frame))]) + rest


def _encode_rest(frame: Frame) -> bytes:
    match frame:
        case Hello():
            return _HELLO.pack(_VERSION, frame.key, frame.page_bytes) + frame.details
        case Welcome():
            return frame.details
        case Reject():
            return _REJECT.pack(frame.stale) + _text(frame.reason)
        case Offer():
            ticket = _OFFER.pack(frame.batch, frame.epoch, frame.reservation, frame.generation)
            return ticket + struct.pack(f"<{2 * len(frame.runs)}I", *chain.from_iterable(frame.runs))
        case Grant():
            return _BATCH.pack(frame.batch) + struct.pack(f"<{len(frame.places)}Q", *frame.places)
        case Refuse():
            return _REFUSE.pack(frame.batch, frame.stale) + _text(frame.reason)
        case Sent() | Done():
            return _BATCH.pack(frame.batch)
        case Stop():
            return _text(frame.reason)
        case Over():
            return _OVER.pack(frame.key, frame.connection)
        case Heard():
            return b""


def _text(reason: str) -> bytes:
    return reason.encode(errors="replace")[:_MAX_TEXT]


def length(prefix: bytes | bytearray) -> int:
    """How many bytes follow the first PREFIX_BYTES of a frame. Raises TransferError if that can't be."""
    number: int = _PREFIX.unpack(prefix)[0]
    if not 1 <= number <= MAX_FRAME_BYTES:
        raise TransferError(f"the peer announced a frame of {number} bytes")
    return number


def decode(data: bytes) -> Frame:
    """The frame in `data`, which has no length before it.

    Raises:
        TransferError: It is none.
    """
    try:
        return _DECODERS[_KINDS[data[0]]](data[1:])
    except (struct.error, IndexError):
        raise TransferError("the peer sent a malformed frame") from None


def _hello(rest: bytes) -> Hello:
    version, key, page_bytes = _HELLO.unpack_from(rest)
    if version != _VERSION:
        raise TransferError(f"the peer speaks version {version} of the transfer protocol, this worker {_VERSION}")
    return Hello(key, page_bytes, rest[_HELLO.size :])


def _offer(rest: bytes) -> Offer:
    batch, epoch, reservation, generation = _OFFER.unpack_from(rest)
    return Offer(batch, epoch, reservation, generation, tuple(_RUN.iter_unpack(rest[_OFFER.size :])))


def _grant(rest: bytes) -> Grant:
    (batch,) = _BATCH.unpack_from(rest)
    places, left = divmod(len(rest) - _BATCH.size, 8)
    if left:
        raise TransferError("the peer sent a malformed frame")
    return Grant(batch, struct.unpack_from(f"<{places}Q", rest, _BATCH.size))


def _reject(rest: bytes) -> Reject:
    (stale,) = _REJECT.unpack_from(rest)
    return Reject(stale, rest[_REJECT.size :].decode(errors="replace"))


def _refuse(rest: bytes) -> Refuse:
    batch, stale = _REFUSE.unpack_from(rest)
    return Refuse(batch, stale, rest[_REFUSE.size :].decode(errors="replace"))


_DECODERS: dict[type[Frame], Callable[[bytes], Frame]] = {
    Hello: _hello,
    Welcome: Welcome,
    Reject: _reject,
    Offer: _offer,
    Grant: _grant,
    Refuse: _refuse,
    Sent: lambda rest: Sent(*_BATCH.unpack(rest)),
    Done: lambda rest: Done(*_BATCH.unpack(rest)),
    Stop: lambda rest: Stop(rest.decode(errors="replace")),
    Over: lambda rest: Over(*_OVER.unpack(rest)),
    Heard: lambda _: Heard(),
}
_KINDS = tuple(_DECODERS)  # a frame's kind on the wire is its place here


def refusal(frame: Reject | Refuse) -> TransferError:
    """The error that it means."""
    return StaleTransferError(frame.reason) if frame.stale else TransferError(frame.reason)

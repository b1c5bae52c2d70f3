"""The messages of a connection, beside the pages.

    sender                              receiver
    Hello(nonce, code, …, details) ──▶
                                   ◀──  Welcome(nonce, code, details) | Reject(reason)          once a connection
    Proof(code)                    ──▶                                   see `kvtransfer.session.greeting`
    Offer(batch, ticket, runs)     ──▶
                                   ◀──  Grant(batch, places) | Refuse(batch, reason)
    the pages                      ══▶  to the granted places: one-sided writes, or Pages(batch, data) frames
    Sent(batch)                    ──▶                                   one-sided writes do not show at the receiver
                                   ◀──  Done(batch)                      the landing has counted the batch
                                   ◀──  Stop(reason)                     send no more

A granted batch is sent completely, or the connection ends. If a broken connection does not stop the sender's writes,
the sender reports their end over a connection of its own, until it gets an answer:

    CloseNotice(connection, code)  ──▶                                   nothing is being written over that one any more
                                   ◀──  CloseAck | Reject(reason)

A frame that does not parse raises TransferError, and the connection is given up.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from cpd.common.errors import StaleTransferError, TransferError

MAX_FRAME_BYTES = 1 << 20
PREFIX_BYTES = 4
CONNECTION_BYTES = 16
NONCE_BYTES = 16
CODE_BYTES = 16

_VERSION = 8
_MAX_TEXT = 512
_PREFIX = struct.Struct("<I")
_RUN = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection.

    Attributes:
        nonce: Random.
        code: Shows that the sender knows the receiver's key.
        page_bytes: Page size that the sender expects of the receiver.
        details: What the transport adds.
    """

    version: int = field(default=_VERSION, kw_only=True)
    nonce: bytes
    code: bytes
    page_bytes: int
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open.

    Attributes:
        nonce: Random.
        code: Shows that the receiver has said this, to this Hello.
        details: What the transport adds.
    """

    nonce: bytes
    code: bytes
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Proof:
    """The sender has sent its Hello now, and not somebody else before."""

    code: bytes


@dataclass(frozen=True, slots=True)
class Reject:
    """The connection will not be used."""

    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks to send these runs, each (index, count) of the ticket's pages. `layout`: see `kvtransfer.segments`."""

    batch: int
    epoch: int
    reservation: int
    generation: int
    layout: int = field(default=0, kw_only=True)
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The batch may be sent: run k to the pages from `places[k]` of the receiver's pool."""

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
    """The landing has counted the batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The receiver gives up the connection: send no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class CloseNotice:
    """Nothing is or will be written over another connection of this sender.

    Attributes:
        connection: The name that the sender gave to that connection when it opened it.
        code: Shows that the sender knows the receiver's key.
    """

    connection: bytes
    code: bytes


@dataclass(frozen=True, slots=True)
class CloseAck:
    """The receiver has taken note of the close notice."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The next bytes of a granted batch, in the order of its offer. They may end anywhere in a page."""

    batch: int
    data: bytes | memoryview


Frame = Hello | Welcome | Reject | Offer | Grant | Refuse | Sent | Done | Stop | CloseNotice | CloseAck | Proof | Pages


@dataclass(frozen=True, slots=True)
class _Rest:
    """The last field of a frame, which has any length."""

    pack: Callable[[Any], bytes | memoryview]
    unpack: Callable[[memoryview], Any]


_BYTES = _Rest(bytes, bytes)
_DATA = _Rest(lambda data: data, lambda data: data)  # not copied
_TEXT = _Rest(lambda text: text.encode(errors="replace")[:_MAX_TEXT], lambda data: bytes(data).decode(errors="replace"))
_RUNS = _Rest(
    lambda runs: struct.pack(f"<{2 * len(runs)}I", *chain.from_iterable(runs)),
    lambda data: tuple(_RUN.iter_unpack(data)),
)
_PLACES = _Rest(
    lambda places: struct.pack(f"<{len(places)}Q", *places),
    lambda data: struct.unpack(f"<{len(data) // 8}Q", data),
)

_FORMATS: dict[type[Frame], tuple[struct.Struct, _Rest | None]] = {
    Hello: (struct.Struct(f"<B{NONCE_BYTES}s{CODE_BYTES}sQ"), _BYTES),
    Welcome: (struct.Struct(f"<{NONCE_BYTES}s{CODE_BYTES}s"), _BYTES),
    Reject: (struct.Struct("<?"), _TEXT),
    Offer: (struct.Struct("<QQQQQ"), _RUNS),
    Grant: (struct.Struct("<Q"), _PLACES),
    Refuse: (struct.Struct("<Q?"), _TEXT),
    Sent: (struct.Struct("<Q"), None),
    Done: (struct.Struct("<Q"), None),
    Stop: (struct.Struct("<"), _TEXT),
    CloseNotice: (struct.Struct(f"<{CONNECTION_BYTES}s{CODE_BYTES}s"), None),
    CloseAck: (struct.Struct("<"), None),
    Proof: (struct.Struct(f"<{CODE_BYTES}s"), None),
    Pages: (struct.Struct("<Q"), _DATA),
}
_KINDS: tuple[type[Any], ...] = tuple(_FORMATS)  # a frame's kind on the wire is its index here


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, with their length before them."""
    fixed, rest = _FORMATS[type(frame)]
    values = [getattr(frame, each.name) for each in fields(frame)]
    last = rest.pack(values.pop()) if rest is not None else b""
    head = bytes([_KINDS.index(type(frame))]) + fixed.pack(*values)
    return b"".join((_PREFIX.pack(len(head) + len(last)), head, last))


def length(prefix: bytes | bytearray) -> int:
    """The number of bytes that follow the first PREFIX_BYTES of a frame. Raises TransferError if it is impossible."""
    number: int = _PREFIX.unpack(prefix)[0]
    if not 1 <= number <= MAX_FRAME_BYTES:
        raise TransferError(f"the peer announced a frame of {number} bytes")
    return number


def decode(data: bytes) -> Frame:
    """The frame in `data`, which has no length before it.

    Raises:
        TransferError: The bytes are not a frame, or one of another version of the protocol.
    """
    try:
        kind = _KINDS[data[0]]
        fixed, rest = _FORMATS[kind]
        values = list(fixed.unpack_from(data, 1))
        last = memoryview(data)[1 + fixed.size :]
        if kind is Hello and values[0] != _VERSION:
            raise TransferError(
                f"the peer speaks version {values[0]} of the transfer protocol, this worker version {_VERSION}"
            )
        if rest is not None:
            values.append(rest.unpack(last))
        elif len(last):
            raise TransferError("the peer sent a malformed frame")
        frame: Frame = kind(**dict(zip((each.name for each in fields(kind)), values, strict=True)))
        return frame
    except (struct.error, IndexError):
        raise TransferError("the peer sent a malformed frame") from None


def refusal(frame: Reject | Refuse) -> TransferError:
    """The error that a refusal stands for."""
    return StaleTransferError(frame.reason) if frame.stale else TransferError(frame.reason)

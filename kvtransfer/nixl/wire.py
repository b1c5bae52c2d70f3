"""What two NIXL transports say to each other beside the pages: length-prefixed frames over TCP.

    sender                              receiver
    Hello(key, page size, process) ──▶
                                   ◀──  Welcome(local, NIXL's metadata, pool) | Reject(reason)   once a connection
    Offer(batch, ticket, runs)     ──▶
                                   ◀──  Grant(batch, pages) | Refuse(batch, reason)
    one-sided writes               ══▶  into the pages granted
    Written(batch)                 ──▶                                   every page has arrived
                                   ◀──  Done(batch)                      and the landing knows it
                                   ◀──  Stop(reason)                     write no more
    Bye                            ──▶                                   nothing is being written any more, or will be

What was granted is written completely, or the connection ends. Nothing of a peer is trusted: a frame that does not
parse raises TransferError, and the connection is given up.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from cpd.errors import StaleTransferError, TransferError
from kvtransfer import addresses
from kvtransfer.addresses import KEY_BYTES
from kvtransfer.nixl.process import ProcessIdentity

MAX_RUNS = 1024  # in one offer
MAX_FRAME_BYTES = 1 << 20
PREFIX_BYTES = 4

_VERSION = 1
_MAX_TEXT = 512
_PREFIX = struct.Struct("<I")
_HELLO = struct.Struct(f"<B{KEY_BYTES}sQ16sQQQ")
_WELCOME = struct.Struct("<?QQ")
_OFFER = struct.Struct("<QQQQ")
_RUN = struct.Struct("<II")
_BATCH = struct.Struct("<Q")
_PAGE = struct.Struct("<I")
_MOST = (1 << 31) - 1
_MOST_PAGES = 1 << 24
_REFUSE = struct.Struct("<Q?")
_REJECT = struct.Struct("<?")


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection: the key from the receiver's address, the sender's page size, and its process."""

    key: bytes
    page_bytes: int
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open.

    Attributes:
        local: The receiver can see the sender's process: pages go through memory, not a network.
        metadata: Of the receiver's NIXL agent.
        pointer: Where its pool begins.
        num_pages: Of the pool.
    """

    local: bool
    metadata: bytes
    pointer: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The connection will not be used."""

    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks to write these runs, (index, count) into the ticket's pages."""

    batch: int
    epoch: int
    reservation: int
    generation: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The batch may be written: run k begins at page `pages[k]` of the receiver's pool."""

    batch: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of the batch may be written."""

    batch: int
    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """Every page of the batch has arrived."""

    batch: int


@dataclass(frozen=True, slots=True)
class Done:
    """The landing knows that the batch has arrived."""

    batch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The receiver gives the connection up: write no more, and say Bye."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Nothing is being written any more over this connection, or will be."""


Frame = Hello | Welcome | Reject | Offer | Grant | Refuse | Written | Done | Stop | Bye


def encode(frame: Frame) -> bytes:
    """A frame with its length before it."""
    rest = _encode_rest(frame)
    return _PREFIX.pack(1 + len(rest)) + bytes([_KINDS.index(type(frame))]) + rest


def _encode_rest(frame: Frame) -> bytes:
    match frame:
        case Hello():
            who = frame.process
            return _HELLO.pack(_VERSION, frame.key, frame.page_bytes, who.boot, who.pid_namespace, who.pid, who.started)
        case Welcome():
            return _WELCOME.pack(frame.local, frame.pointer, frame.num_pages) + frame.metadata
        case Reject():
            return _REJECT.pack(frame.stale) + _text(frame.reason)
        case Offer():
            ticket = _OFFER.pack(frame.batch, frame.epoch, frame.reservation, frame.generation)
            return ticket + struct.pack(f"<{2 * len(frame.runs)}I", *chain.from_iterable(frame.runs))
        case Grant():
            return _BATCH.pack(frame.batch) + struct.pack(f"<{len(frame.pages)}I", *frame.pages)
        case Refuse():
            return _REFUSE.pack(frame.batch, frame.stale) + _text(frame.reason)
        case Written() | Done():
            return _BATCH.pack(frame.batch)
        case Stop():
            return _text(frame.reason)
        case Bye():
            return b""


def _text(reason: str) -> bytes:
    return reason.encode(errors="replace")[:_MAX_TEXT]


def length(prefix: bytes) -> int:
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
    version, key, page_bytes, *process = _HELLO.unpack(rest)
    if version != _VERSION:
        raise TransferError(f"the peer speaks version {version} of the transfer protocol, this worker {_VERSION}")
    identity = ProcessIdentity(*process)
    if not 0 < identity.pid <= _MOST:
        raise TransferError(f"the peer says that its process has the number {identity.pid}")
    return Hello(key, page_bytes, identity)


def _welcome(rest: bytes) -> Welcome:
    local, pointer, num_pages = _WELCOME.unpack_from(rest)
    if not 0 < num_pages <= _MOST_PAGES:
        raise TransferError(f"the peer says that its pool has {num_pages} pages")
    return Welcome(local, rest[_WELCOME.size :], pointer, num_pages)


def _offer(rest: bytes) -> Offer:
    batch, epoch, reservation, generation = _OFFER.unpack_from(rest)
    return Offer(batch, epoch, reservation, generation, tuple(_RUN.iter_unpack(rest[_OFFER.size :])))


def _grant(rest: bytes) -> Grant:
    (batch,) = _BATCH.unpack_from(rest)
    pages = tuple(page for (page,) in _PAGE.iter_unpack(rest[_BATCH.size :]))
    if any(page >= _MOST_PAGES for page in pages):
        raise TransferError(f"the peer granted page {max(pages)}, which no pool has")
    return Grant(batch, pages)


def _reject(rest: bytes) -> Reject:
    (stale,) = _REJECT.unpack_from(rest)
    return Reject(stale, rest[_REJECT.size :].decode(errors="replace"))


def _refuse(rest: bytes) -> Refuse:
    batch, stale = _REFUSE.unpack_from(rest)
    return Refuse(batch, stale, rest[_REFUSE.size :].decode(errors="replace"))


_DECODERS: dict[type[Frame], Callable[[bytes], Frame]] = {
    Hello: _hello,
    Welcome: _welcome,
    Reject: _reject,
    Offer: _offer,
    Grant: _grant,
    Refuse: _refuse,
    Written: lambda rest: Written(*_BATCH.unpack(rest)),
    Done: lambda rest: Done(*_BATCH.unpack(rest)),
    Stop: lambda rest: Stop(rest.decode(errors="replace")),
    Bye: lambda _: Bye(),
}
_KINDS = tuple(_DECODERS)  # a frame's kind on the wire is its place here


def refusal(stale: bool, reason: str) -> TransferError:
    """The error that a Reject or Refuse means."""
    return StaleTransferError(reason) if stale else TransferError(reason)


class Address(addresses.Address):
    """Of a nixl transport."""

    __slots__ = ()
    MAGIC = b"cpdn"
    TRANSPORT = "nixl"

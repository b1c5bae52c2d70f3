"""What two nixl transports tell each other when they connect, beside what all do."""

import struct
from dataclasses import dataclass

from cpd.errors import TransferError
from kvtransfer import addresses
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.session.frames import CONNECTION_BYTES

_PROCESS = struct.Struct("<16sQQQ")
_POOL = struct.Struct("<?QQ")
_MOST_PID = (1 << 31) - 1
_MOST_PAGES = 1 << 24


class Address(addresses.Address):
    """Of a nixl transport."""

    __slots__ = ()
    MAGIC = b"cpdn"
    TRANSPORT = "nixl"


@dataclass(frozen=True, slots=True)
class LocalSender:
    """A sender that can write straight into the memory of a receiver on its machine.

    Attributes:
        connection: Names this one, see `kvtransfer.session.frames.Over`.
        process: The sender's.
    """

    connection: bytes
    process: ProcessIdentity

    def encode(self) -> bytes:
        return self.connection + encode_process(self.process)

    @classmethod
    def decode(cls, data: bytes) -> "LocalSender":
        """Raises TransferError if it is none."""
        return cls(data[:CONNECTION_BYTES], decode_process(data[CONNECTION_BYTES:]))


@dataclass(frozen=True, slots=True)
class ReceiversPool:
    """Where the sender may write, when it is granted.

    Attributes:
        pointer: Where the pool begins, in the receiver's memory.
        num_pages: Of the pool.
        through: The receiver's process, if both are of one machine; else the metadata of the receiver's NIXL agent.
    """

    pointer: int
    num_pages: int
    through: ProcessIdentity | bytes

    def encode(self) -> bytes:
        local = isinstance(self.through, ProcessIdentity)
        rest = encode_process(self.through) if isinstance(self.through, ProcessIdentity) else self.through
        return _POOL.pack(local, self.pointer, self.num_pages) + rest

    @classmethod
    def decode(cls, data: bytes) -> "ReceiversPool":
        """Raises TransferError if it is none."""
        try:
            local, pointer, num_pages = _POOL.unpack_from(data)
        except struct.error:
            raise TransferError("the peer sent a malformed frame") from None
        if not 0 < num_pages <= _MOST_PAGES:
            raise TransferError(f"the peer says that its pool has {num_pages} pages")
        rest = data[_POOL.size :]
        return cls(pointer, num_pages, decode_process(rest) if local else rest)


def encode_process(process: ProcessIdentity) -> bytes:
    return _PROCESS.pack(process.boot, process.pid_namespace, process.pid, process.started)


def decode_process(data: bytes) -> ProcessIdentity:
    """Raises TransferError if it is none."""
    try:
        identity = ProcessIdentity(*_PROCESS.unpack(data))
    except struct.error:
        raise TransferError("the peer sent a malformed frame") from None
    if not 0 < identity.pid <= _MOST_PID:
        raise TransferError(f"the peer says that its process has the number {identity.pid}")
    return identity

"""What two nixl transports tell each other when they connect, beside what all do."""

import struct
from dataclasses import dataclass

from cpd.common.errors import TransferError
from kvtransfer import addresses
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.session.frames import CONNECTION_BYTES

_PROCESS = struct.Struct("<16sQQQ")
_SENDER = struct.Struct(f"<??{CONNECTION_BYTES}s")
_POOL = struct.Struct("<?QQq")
_HOST = -1
_MOST_PID = (1 << 31) - 1
_MOST_PAGES = 1 << 24


class Address(addresses.Address):
    """Of a nixl transport."""

    __slots__ = ()
    MAGIC = b"cpdn"
    TRANSPORT = "nixl"


@dataclass(frozen=True, slots=True)
class Sender:
    """Who will write.

    Attributes:
        connection: Names this one, see `kvtransfer.session.frames.Over`.
        process: The sender's.
        on_device: Whether its pool is in a GPU's memory.
        straight: Whether it would have the kernel write into the host memory of a process of its machine.
    """

    connection: bytes
    process: ProcessIdentity
    on_device: bool
    straight: bool

    def encode(self) -> bytes:
        return _SENDER.pack(self.on_device, self.straight, self.connection) + encode_process(self.process)

    @classmethod
    def decode(cls, data: bytes) -> "Sender":
        """Raises TransferError if it is none."""
        try:
            on_device, straight, connection = _SENDER.unpack_from(data)
        except struct.error:
            raise TransferError("the peer sent a malformed frame") from None
        return cls(connection, decode_process(data[_SENDER.size :]), on_device, straight)


@dataclass(frozen=True, slots=True)
class ReceiversPool:
    """Where the sender may write, when it is granted.

    Attributes:
        pointer: Where the pool begins, in the receiver's memory.
        num_pages: Of the pool.
        device: See `kvtransfer.base.PoolMemory`, as the receiver numbers them.
        process: The receiver's, if the sender writes into the memory of a process of its own machine.
        agent: Metadata of the receiver's NIXL agent; empty: the kernel writes.
    """

    pointer: int
    num_pages: int
    device: int | None
    process: ProcessIdentity | None
    agent: bytes

    def encode(self) -> bytes:
        device = _HOST if self.device is None else self.device
        process = encode_process(self.process) if self.process else b""
        return _POOL.pack(bool(process), self.pointer, self.num_pages, device) + process + self.agent

    @classmethod
    def decode(cls, data: bytes) -> "ReceiversPool":
        """Raises TransferError if it is none."""
        try:
            local, pointer, num_pages, device = _POOL.unpack_from(data)
        except struct.error:
            raise TransferError("the peer sent a malformed frame") from None
        if not 0 < num_pages <= _MOST_PAGES:
            raise TransferError(f"the peer says that its pool has {num_pages} pages")
        rest = data[_POOL.size :]
        process = decode_process(rest[: _PROCESS.size]) if local else None
        agent = rest[_PROCESS.size :] if local else rest
        if process is None and not agent:
            raise TransferError("the peer sent a malformed frame")
        return cls(pointer, num_pages, None if device < 0 else device, process, agent)


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

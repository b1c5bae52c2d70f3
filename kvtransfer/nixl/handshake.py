"""What two nixl transports tell each other when they connect, in addition to the common protocol."""

import struct
from dataclasses import astuple, dataclass
from typing import Any

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer import addresses
from kvtransfer.session.frames import CONNECTION_BYTES

_SENDER = struct.Struct(f"<??{CONNECTION_BYTES}s16sQQQ")
_POOL = struct.Struct("<QQq16sQQQ")
_HOST = -1
_NO_PROCESS = ProcessIdentity(bytes(16), 0, 0, 0)
_MAX_PID = (1 << 31) - 1
_MAX_PAGES = 1 << 24


class Address(addresses.Address):
    """Address of a nixl transport."""

    __slots__ = ()
    MAGIC = b"cpdn"
    TRANSPORT = "nixl"


@dataclass(frozen=True, slots=True)
class SenderDetails:
    """The sender of pages, as the receiver needs to know it.

    Attributes:
        connection_id: Secret name of the connection, for `kvtransfer.session.frames.CloseNotice`.
        process: The sender's process.
        on_device: True if its pool is in GPU memory.
        same_host: True if it wants the kernel to write into the host memory of a process of its machine.
        loads_nixl: True if it can use NIXL.
    """

    connection_id: bytes
    process: ProcessIdentity
    on_device: bool
    same_host: bool
    loads_nixl: bool

    def encode(self) -> bytes:
        fixed = _SENDER.pack(self.on_device, self.same_host, self.connection_id, *astuple(self.process))
        return fixed + bytes([self.loads_nixl])

    @classmethod
    def decode(cls, data: bytes) -> "SenderDetails":
        """Raises TransferError if `data` is malformed."""
        (on_device, same_host, connection_id), process = _unpack(_SENDER, data)
        if process.pid == 0:
            raise TransferError("the peer does not say which process it is")
        # An older sender's end here, and it loads NIXL.
        return cls(connection_id, process, on_device, same_host, loads_nixl=data[_SENDER.size :] != b"\0")


@dataclass(frozen=True, slots=True)
class ReceiverPool:
    """Where the sender may write once it has a grant.

    Attributes:
        pointer: Start of the pool in the receiver's memory.
        num_pages: Number of pages of the pool.
        device: See `kvtransfer.base.PoolMemory`, as the receiver numbers devices.
        process: The receiver's process, if the sender writes into the memory of a process of its own machine.
        agent: Metadata of the receiver's NIXL agent. Empty if the kernel writes. If there is neither process nor agent,
            the sender sends the pages in the connection's stream.
    """

    pointer: int
    num_pages: int
    device: int | None
    process: ProcessIdentity | None
    agent: bytes

    def encode(self) -> bytes:
        device = _HOST if self.device is None else self.device
        process = astuple(self.process or _NO_PROCESS)
        return _POOL.pack(self.pointer, self.num_pages, device, *process) + self.agent

    @classmethod
    def decode(cls, data: bytes) -> "ReceiverPool":
        """Raises TransferError if `data` is malformed."""
        (pointer, num_pages, device), process = _unpack(_POOL, data)
        agent = data[_POOL.size :]
        if not 0 < num_pages <= _MAX_PAGES:
            raise TransferError(f"the peer says that its pool has {num_pages} pages")
        return cls(pointer, num_pages, None if device < 0 else device, process if process.pid else None, agent)


def _unpack(layout: struct.Struct, data: bytes) -> tuple[list[Any], ProcessIdentity]:
    """The values before the process, and the process. Raises TransferError if they are malformed."""
    try:
        *values, boot, namespace, pid, started = layout.unpack_from(data)
    except struct.error:
        raise TransferError("the peer sent a malformed frame") from None
    if pid > _MAX_PID:
        raise TransferError(f"the peer says that its process has the ID {pid}")
    return values, ProcessIdentity(boot, namespace, pid, started)

"""Where transports listen, and the network devices of this machine."""

import asyncio
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from cpd.common.errors import ConfigError, TransferError

KEY_BYTES = 16
_ADDRESS = struct.Struct(f"<4sH{KEY_BYTES}s")
_SIOCGIFADDR = 0x8915
_RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a transport listens, and the secret that lets a peer in. Each transport has its own subclass.

    Attributes:
        MAGIC: First four bytes of the encoded address.
        TRANSPORT: Name of the transport.
    """

    MAGIC: ClassVar[bytes]
    TRANSPORT: ClassVar[str]

    host: str
    port: int
    key: bytes

    def encode(self) -> bytes:
        return _ADDRESS.pack(self.MAGIC, self.port, self.key) + self.host.encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises TransferError if `data` is not an address of this transport."""
        try:
            magic, port, key = _ADDRESS.unpack_from(data)
            host = data[_ADDRESS.size :].decode()
        except (struct.error, UnicodeDecodeError):
            magic, host = b"", ""
        if magic != cls.MAGIC or not host:
            raise TransferError(f"this is not the address of a {cls.TRANSPORT} transport")
        return cls(host, port, key)


async def resolve(host: str) -> str:
    """The IPv4 address of a host name. Raises TransferError if there is none."""
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=socket.AF_INET)
    except OSError as error:
        raise TransferError(f"{host} has no IPv4 address: {error}") from None
    return str(found[0][4][0])


def interface_of(host: str) -> str:
    """The network interface with this IPv4 address; empty for 0.0.0.0. Raises ConfigError if there is none."""
    address = ipaddress.IPv4Address(host)
    if address.is_unspecified:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                own = ipaddress.IPv4Address(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
            except OSError:  # an interface without an IPv4 address
                continue
            if own == address or (own.is_loopback and address.is_loopback):
                return name
    raise ConfigError(f"host: no network interface has the IPv4 address {host}")


def network_devices(host: str) -> tuple[str, ...]:
    """The devices that reach other machines from this IPv4 address, in UCX's names.

    These are its interface and every RDMA port with a link; for a loopback address the interface alone. Empty (all
    devices) for 0.0.0.0. Raises ConfigError like `interface_of`.
    """
    interface = interface_of(host)
    if not interface:
        return ()
    return interface, *(() if ipaddress.IPv4Address(host).is_loopback else rdma_ports())


def rdma_ports() -> tuple[str, ...]:
    """The RDMA ports of this machine that have a link, in UCX's names, such as mlx5_0:1."""
    states = sorted(_RDMA.glob("*/ports/*/state"))
    return tuple(f"{file.parts[-4]}:{file.parts[-2]}" for file in states if "ACTIVE" in file.read_text())

"""Where transports listen, and the network devices of this machine."""

import asyncio
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import psutil

from cpd.common.errors import ConfigError, TransferError

KEY_BYTES = 16
_ADDRESS = struct.Struct(f"<4sH{KEY_BYTES}s")
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
    """The address of a host name, rather an IPv4 than an IPv6 one. Raises TransferError if there is none."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"{host} has no IP address: {error}") from None
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def interface_of(host: str) -> str:
    """The network interface with this IP address; empty for 0.0.0.0 and ::. Raises ConfigError if there is none."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(one.address)
                if own == address or (own.is_loopback and address.is_loopback):
                    return name
    raise ConfigError(f"host: no network interface has the address {host}")


def network_devices(host: str) -> tuple[str, ...]:
    """The devices that reach other machines from this IP address, in UCX's names.

    These are its interface and every RDMA port with a link; for a loopback address the interface alone. Empty (all
    devices) for 0.0.0.0 and ::. Raises ConfigError like `interface_of`.
    """
    interface = interface_of(host)
    if not interface:
        return ()
    return interface, *(() if ipaddress.ip_address(host).is_loopback else rdma_ports())


def rdma_ports() -> tuple[str, ...]:
    """The RDMA ports of this machine that have a link, in UCX's names, such as mlx5_0:1."""
    states = sorted(_RDMA.glob("*/ports/*/state"))
    return tuple(f"{file.parts[-4]}:{file.parts[-2]}" for file in states if "ACTIVE" in file.read_text())

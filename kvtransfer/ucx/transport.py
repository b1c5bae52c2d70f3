"""The UCX transport as callers see it, on the event loop. Its work happens on the reactor's thread."""

import asyncio
import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any

from cpd.common.errors import ConfigError, TransferError
from kvtransfer import addresses
from kvtransfer.addresses import KEY_BYTES, interface_of, resolve
from kvtransfer.base import Peer, PoolMemory, Route, Segment, Ticket
from kvtransfer.landings import LandingEntry, LandingTable
from kvtransfer.nixl import handshake
from kvtransfer.nixl.transport import NixlTransport
from kvtransfer.pushes import PushedTransfer, prepare_push
from kvtransfer.ucx.incoming import Incoming
from kvtransfer.ucx.outgoing import Outgoing
from kvtransfer.ucx.reactor import Reactor

_MESSAGE_BYTES = 1 << 20  # contiguous pages travel together up to this size


class Address(addresses.Address):
    """Address of a ucx transport."""

    __slots__ = ()
    MAGIC = b"cpdu"
    TRANSPORT = "ucx"


class UcxPeer:
    """A connection to a receiver (implements `kvtransfer.base.Peer`). Created by `UcxTransport.connect`."""

    route: Route = "network"

    def __init__(self, reactor: Reactor, connection: Outgoing, memory: PoolMemory, page_bytes: int) -> None:
        self._reactor = reactor
        self._connection = connection
        self._memory = memory
        self._page_bytes = page_bytes

    @property
    def alive(self) -> bool:
        return not self._connection.failed

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        max_pages = max(1, _MESSAGE_BYTES // self._memory.page_bytes)
        transfer = prepare_push(ticket, pages, self._memory, self._page_bytes, max_pages, self._reactor.call)
        self._reactor.call(functools.partial(self._connection.submit, transfer))
        return transfer

    async def close(self) -> None:
        self._reactor.call(functools.partial(self._connection.fail, "the connection was closed"))
        await self._connection.gone.wait()


class UcxTransport:
    """Implements `kvtransfer.base.Transport`. Created by `open`.

    Beside UCX it has a transport for peers that use nixl, over the same landings.

    Attributes:
        address: Contains the secret that lets peers in. Send it over authenticated connections only.
    """

    name = "ucx"
    reason = ""

    def __init__(self, memory: PoolMemory, *, epoch: int, host: str, device_host: str) -> None:
        self.epoch = epoch
        self.address = self.common_address = b""
        self._other: NixlTransport
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._landings = LandingTable(self._loop, memory, epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._ended = ""
        self._reactor = Reactor(ucx_options(device_host), host, memory, accept=self._accept, ended=self._end)

    @classmethod
    async def open(
        cls, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str, device_host: str, same_host: bool
    ) -> "UcxTransport":
        """Opens a transport that listens.

        Args:
            memory: The pool.
            epoch: Epoch of the pool.
            host: IPv4 address to listen on.
            advertise_host: Host that peers connect to.
            device_host: IPv4 address of the interface for pages; 0.0.0.0 for any.
            same_host: True if it may exchange pages with nixl peers of this machine directly through memory.

        Raises:
            ConfigError: `host` is not an IPv4 address of this machine.
            TransferError: UCX cannot be set up.
        """
        transport = cls(memory, epoch=epoch, host=host, device_host=device_host)
        other = transport._other = await NixlTransport.open(
            memory,
            epoch=epoch,
            host=host,
            advertise_host=advertise_host,
            device_host=device_host,
            same_host=same_host,
            landings=transport._landings,
            loads_nixl=False,
        )
        try:
            await transport._reactor.start()
        except (ConfigError, TransferError):
            await other.close()
            raise
        transport.address = Address(advertise_host, transport._reactor.port, transport._key).encode()
        transport.common_address = other.address
        return transport

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> LandingEntry:
        return self._landings.expect(reservation, generation, pages, segments)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> Peer:
        if address.startswith(handshake.Address.MAGIC):
            return await self._other.connect(address, page_bytes)
        where, page_bytes = Address.decode(address), page_bytes or self._memory.page_bytes
        ip = await resolve(where.host)
        made: list[Outgoing] = []
        try:
            await self._reactor.run(lambda: made.append(self._dial(ip, where, page_bytes)))
            connection = made[0]
            await connection.greeted.wait()
        except asyncio.CancelledError:
            self._reactor.call(functools.partial(_abandon, made))
            raise
        if connection.error is not None:
            text = f"no connection to {where.host}:{where.port}: {connection.error}"
            raise type(connection.error)(text) from None
        return UcxPeer(self._reactor, connection, self._memory, page_bytes)

    async def close(self) -> None:
        self._landings.close("the transport was closed")
        await self._reactor.stop()
        await self._other.close()

    # ---- on the reactor's thread

    def _dial(self, ip: str, where: Address, page_bytes: int) -> Outgoing:
        if self._ended:
            raise TransferError(self._ended)
        try:
            endpoint = self._reactor.connect(ip, where.port)
            return Outgoing(self._reactor, endpoint, self._loop, self._memory, page_bytes, where.key)
        except self._reactor.ucx.UCXError as error:
            raise TransferError(f"no connection to {ip}:{where.port}: {error}") from None

    def _accept(self, endpoint: Any) -> None:
        Incoming(self._reactor, endpoint, self._landings, self._memory.page_bytes, self._key)

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._landings.close(reason)


def ucx_options(host: str) -> dict[str, str]:
    """UCX configuration of a transport whose pages use the interface with the IPv4 address `host`; 0.0.0.0: any.

    UCX_TLS and UCX_NET_DEVICES of the environment take precedence.
    """
    options = {
        "TLS": os.environ.get("UCX_TLS", "tcp"),
        # Detects an unreachable host within seconds.
        "TCP_KEEPIDLE": "2s",
        "TCP_KEEPINTVL": "1s",
        "TCP_KEEPCNT": "3",
    }
    devices = os.environ.get("UCX_NET_DEVICES") or interface_of(host)
    return options | ({"NET_DEVICES": devices} if devices else {})


def _abandon(connections: list[Outgoing]) -> None:
    for connection in connections:
        connection.fail("connecting was cancelled")

"""The UCX transport as callers see it, on the event loop. What it does happens on the reactor's thread."""

import asyncio
import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any

from cpd.common.errors import ConfigError, TransferError
from kvtransfer import addresses
from kvtransfer.addresses import KEY_BYTES, interface_of, resolve
from kvtransfer.base import Cost, PoolMemory, Route, Ticket
from kvtransfer.landings import BookedLanding, LandingBook
from kvtransfer.pushes import PushedTransfer, check_push, merge
from kvtransfer.ucx.incoming import Incoming
from kvtransfer.ucx.outgoing import Outgoing
from kvtransfer.ucx.reactor import Reactor

_MESSAGE_BYTES = 1 << 20  # neighbouring pages travel together up to this size


class Address(addresses.Address):
    """Of a ucx transport."""

    __slots__ = ()
    MAGIC = b"cpdu"
    TRANSPORT = "ucx"


class UcxPeer:
    """A connection to a receiver (implements `kvtransfer.base.Peer`). Made by `UcxTransport.connect`."""

    route: Route = "network"

    def __init__(self, reactor: Reactor, connection: Outgoing, memory: PoolMemory) -> None:
        self._reactor = reactor
        self._connection = connection
        self._memory = memory
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return not self._connection.failed

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        check_push(ticket, pages, self._memory.num_pages)
        most = max(1, _MESSAGE_BYTES // self._memory.page_bytes)
        transfer = PushedTransfer(self._loop, ticket, merge(ticket, pages, most), self._cancel)
        self._reactor.call(functools.partial(self._connection.submit, transfer))
        return transfer

    def _cancel(self, transfer: PushedTransfer) -> None:
        self._reactor.call(functools.partial(transfer.stop, TransferError("the transfer was cancelled")))

    async def close(self) -> None:
        self._reactor.call(functools.partial(self._connection.fail, "the connection was closed"))
        await self._connection.gone.wait()


class UcxTransport:
    """Implements `kvtransfer.base.Transport`. Made by `open`.

    Attributes:
        address: Where it listens and the secret that lets peers in: hand it out over authenticated wires only.
    """

    name = "ucx"
    reason = ""
    cost: Cost | None = None

    def __init__(self, memory: PoolMemory, *, epoch: int, host: str) -> None:
        self.epoch = epoch
        self.address = b""
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._book = LandingBook(self._loop, memory.num_pages, epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._ended = ""
        self._reactor = Reactor(ucx_options(host), host, memory, accept=self._accept, ended=self._end)

    @classmethod
    async def open(cls, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str = "") -> "UcxTransport":
        """A transport that listens; arguments as for `kvtransfer.create`.

        Raises:
            ConfigError: `host` is no IPv4 address of this machine.
            TransferError: UCX cannot be set up.
        """
        try:
            ip = await resolve(host)
        except TransferError as error:
            raise ConfigError(f"host: {error}") from None
        transport = cls(memory, epoch=epoch, host=ip)
        await transport._reactor.start()
        transport.address = Address(advertise_host or ip, transport._reactor.port, transport._key).encode()
        return transport

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> BookedLanding:
        return self._book.expect(reservation, generation, pages)

    async def connect(self, address: bytes) -> UcxPeer:
        where = Address.decode(address)
        ip = await resolve(where.host)
        made: list[Outgoing] = []
        try:
            await self._reactor.run(lambda: made.append(self._dial(ip, where.port, where.key)))
            connection = made[0]
            await connection.greeted.wait()
        except asyncio.CancelledError:
            self._reactor.call(functools.partial(_abandon, made))
            raise
        if connection.error is not None:
            text = f"no connection to {where.host}:{where.port}: {connection.error}"
            raise type(connection.error)(text) from None
        return UcxPeer(self._reactor, connection, self._memory)

    async def close(self) -> None:
        self._book.close("the transport was closed")
        await self._reactor.stop()

    # ---- on the reactor's thread

    def _dial(self, ip: str, port: int, key: bytes) -> Outgoing:
        if self._ended:
            raise TransferError(self._ended)
        try:
            endpoint = self._reactor.connect(ip, port)
            return Outgoing(self._reactor, endpoint, self._loop, self._memory, key)
        except self._reactor.ucx.UCXError as error:
            raise TransferError(f"no connection to {ip}:{port}: {error}") from None

    def _accept(self, endpoint: Any) -> None:
        Incoming(self._reactor, endpoint, self._book, self._memory.page_bytes, self._key)

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._book.close(reason)


def ucx_options(host: str) -> dict[str, str]:
    """UCX configuration for a transport that listens on the IPv4 address `host`.

    UCX_TLS and UCX_NET_DEVICES of the environment win.
    """
    options = {
        "TLS": os.environ.get("UCX_TLS", "tcp"),
        # Finds a host that vanished within seconds.
        "TCP_KEEPIDLE": "2s",
        "TCP_KEEPINTVL": "1s",
        "TCP_KEEPCNT": "3",
    }
    devices = os.environ.get("UCX_NET_DEVICES") or interface_of(host)
    return options | ({"NET_DEVICES": devices} if devices else {})


def _abandon(connections: list[Outgoing]) -> None:
    for connection in connections:
        connection.fail("nobody waits for it any more")

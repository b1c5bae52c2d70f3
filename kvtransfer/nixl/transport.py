"""The NIXL transport as callers see it, on the event loop."""

import asyncio
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence

from cpd.common.errors import ConfigError, TransferError
from cpd.common.stream import stop_listening
from kvtransfer.addresses import KEY_BYTES, resolve
from kvtransfer.base import Cost, PoolMemory, Route, Ticket
from kvtransfer.landings import BookedLanding, LandingBook
from kvtransfer.nixl.details import Address
from kvtransfer.nixl.farewell import farewell
from kvtransfer.nixl.incoming import Incoming
from kvtransfer.nixl.link import Link
from kvtransfer.nixl.neighbour import ForbiddenError
from kvtransfer.nixl.outgoing import Outgoing
from kvtransfer.pushes import PushedTransfer, check_push, merge
from kvtransfer.session.limits import GREETING_S

log = logging.getLogger(__name__)


class NixlPeer:
    """A connection to a receiver (implements `kvtransfer.base.Peer`). Made by `NixlTransport.connect`."""

    def __init__(self, connection: Outgoing, num_pages: int) -> None:
        self._connection = connection
        self._num_pages = num_pages
        self._loop = asyncio.get_running_loop()

    @property
    def route(self) -> Route:
        return "memory" if self._connection.receiver else "network"

    @property
    def alive(self) -> bool:
        return not self._connection.failed

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        check_push(ticket, pages, self._num_pages)
        transfer = PushedTransfer(self._loop, ticket, merge(ticket, pages, self._connection.batch_pages), _cancel)
        self._connection.submit(transfer)
        return transfer

    async def close(self) -> None:
        self._connection.fail("the connection was closed")
        await self._connection.gone.wait()


class NixlTransport:
    """Implements `kvtransfer.base.Transport`. Made by `open`.

    Attributes:
        address: Where it listens and the secret that lets peers in: hand it out over authenticated wires only.
    """

    name = "nixl"
    reason = ""
    cost: Cost | None = None

    def __init__(self, memory: PoolMemory, *, epoch: int, host: str, neighbours: bool) -> None:
        self.epoch = epoch
        self.address = b""
        self._host = host
        self._memory = memory
        self._book = LandingBook(asyncio.get_running_loop(), memory.num_pages, epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._links: set[Link] = set()
        self._farewells: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self._closed = False
        self._neighbours = neighbours

    @classmethod
    async def open(
        cls, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str = "", neighbours: bool = True
    ) -> "NixlTransport":
        """A transport that listens; arguments as for `kvtransfer.create`.

        Raises:
            ConfigError: `host` is no IPv4 address of this machine.
        """
        try:
            ip = await resolve(host)
        except TransferError as error:
            raise ConfigError(f"host: {error}") from None
        transport = cls(memory, epoch=epoch, host=ip, neighbours=neighbours)
        try:
            transport._server = await asyncio.start_server(transport._accept, ip, 0)
        except OSError as error:
            raise ConfigError(f"host: cannot listen on {ip}: {error}; give an IPv4 address of this machine") from None
        port = transport._server.sockets[0].getsockname()[1]
        transport.address = Address(advertise_host or ip, port, transport._key).encode()
        return transport

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> BookedLanding:
        return self._book.expect(reservation, generation, pages)

    async def connect(self, address: bytes) -> NixlPeer:
        where = Address.decode(address)
        connection = await self._dial(where, neighbours=self._neighbours)
        if isinstance(connection.error, ForbiddenError):
            log.warning("pages go to %s over the network also on this machine: %s", where.host, connection.error)
            connection = await self._dial(where, neighbours=False)
        if connection.error is not None:
            text = f"no connection to {where.host}:{where.port}: {connection.error}"
            raise type(connection.error)(text) from None
        return NixlPeer(connection, self._memory.num_pages)

    async def _dial(self, where: Address, *, neighbours: bool) -> Outgoing:
        self._check_open()
        try:
            async with asyncio.timeout(GREETING_S):
                streams = await asyncio.open_connection(await resolve(where.host), where.port)
        except (OSError, TimeoutError) as error:
            raise TransferError(f"no connection to {where.host}:{where.port}: {error}") from None
        self._check_open(streams)
        connection = Outgoing(*streams, self._outgoing_gone, self._host, self._memory, where, neighbours=neighbours)
        self._links.add(connection)
        try:
            await connection.greeted.wait()
        except asyncio.CancelledError:
            connection.fail("nobody waits for it any more")
            raise
        return connection

    async def close(self) -> None:
        """See `kvtransfer.base.Transport.close`. Waits as long as a sender may be writing: see `incoming.py`."""
        self._closed = True
        self._book.close("the transport was closed")
        await self._end_links()  # it listens meanwhile: senders say that they are through
        await asyncio.gather(*self._farewells)
        await stop_listening(self._server)
        await self._end_links()

    async def _end_links(self) -> None:
        links = list(self._links)
        for link in links:
            link.fail("the transport was closed")
        for link in links:
            await link.gone.wait()

    def _check_open(self, streams: tuple[StreamReader, StreamWriter] | None = None) -> None:
        if self._closed:
            if streams is not None:
                streams[1].close()
            raise TransferError("the transport was closed")

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        if not self._server.is_serving():
            writer.close()
            return
        callbacks = self._links.discard, self._over
        self._links.add(Incoming(reader, writer, *callbacks, self._host, self._book, self._memory, self._key))

    def _over(self, connection: bytes) -> None:
        for link in list(self._links):
            if isinstance(link, Incoming) and link.sender is not None and link.sender.connection == connection:
                link.over()

    def _outgoing_gone(self, link: Link) -> None:
        self._links.discard(link)
        assert isinstance(link, Outgoing)
        if link.unheard and link.receiver is not None:
            task = asyncio.create_task(farewell(link.where, link.connection, link.receiver), name="nixl-farewell")
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)


def _cancel(transfer: PushedTransfer) -> None:
    transfer.stop(TransferError("the transfer was cancelled"))

"""The NIXL transport as callers see it, on the event loop."""

import asyncio
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence

from cpd.common.addresses import bound_socket, join_address
from cpd.common.errors import ConfigError, TransferError
from cpd.common.stream import stop_listening
from kvtransfer.addresses import KEY_BYTES, resolve
from kvtransfer.base import PoolMemory, Route, Segment, Ticket
from kvtransfer.landings import LandingEntry, LandingTable
from kvtransfer.nixl.close_notice import give_close_notice
from kvtransfer.nixl.connection import Connection
from kvtransfer.nixl.handshake import Address
from kvtransfer.nixl.incoming import Incoming
from kvtransfer.nixl.outgoing import Outgoing
from kvtransfer.nixl.same_host import ForbiddenError
from kvtransfer.pushes import PushedTransfer, prepare_push
from kvtransfer.session import frames
from kvtransfer.session.limits import GREETING_S

log = logging.getLogger(__name__)


class NixlPeer:
    """A connection to a receiver (implements `kvtransfer.base.Peer`). Created by `NixlTransport.connect`."""

    def __init__(self, connection: Outgoing, memory: PoolMemory, page_bytes: int) -> None:
        self._connection = connection
        self._memory = memory
        self._page_bytes = page_bytes

    @property
    def route(self) -> Route:
        return "memory" if self._connection.receiver else "network"

    @property
    def alive(self) -> bool:
        return not self._connection.failed

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        transfer = prepare_push(ticket, pages, self._memory, self._page_bytes, self._connection.batch_pages)
        self._connection.submit(transfer)
        return transfer

    async def close(self) -> None:
        self._connection.fail("the connection was closed")
        await self._connection.gone.wait()


class NixlTransport:
    """Implements `kvtransfer.base.Transport`. Created by `open`.

    Without NIXL (`loads_nixl=False`) it writes into processes of the same machine, and sends pages to other machines in
    the stream of the connection.

    Attributes:
        address: Contains the secret that lets peers in. Send it over authenticated connections only.
    """

    name = "nixl"
    reason = ""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        epoch: int,
        device_host: str,
        same_host: bool,
        landings: LandingTable | None,
        loads_nixl: bool,
    ) -> None:
        self.epoch = epoch
        self.address = self.common_address = b""
        self._device_host = device_host
        self._memory = memory
        self._landings = landings or LandingTable(asyncio.get_running_loop(), memory, epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._connections: set[Connection] = set()
        self._close_notices: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self._closed = False
        self._same_host = same_host
        self._loads_nixl = loads_nixl

    @classmethod
    async def open(
        cls,
        memory: PoolMemory,
        *,
        epoch: int,
        host: str,
        advertise_host: str,
        device_host: str,
        same_host: bool,
        landings: LandingTable | None = None,
        loads_nixl: bool = True,
    ) -> "NixlTransport":
        """Opens a transport that listens.

        Args:
            memory: The pool.
            epoch: Epoch of the pool.
            host: IP address to listen on.
            advertise_host: Host that peers connect to.
            device_host: IP address of the interface for pages; 0.0.0.0 or :: for any.
            same_host: True if it may write directly into the host memory of other processes of this machine.
            landings: The pool's landings, if another transport of the pool has made the table.
            loads_nixl: False in a process with ucxx, which can't load NIXL as well. The pool is in host memory.

        Raises:
            ConfigError: `host` is not an address of this machine.
        """
        transport = cls(
            memory,
            epoch=epoch,
            device_host=device_host,
            same_host=same_host,
            landings=landings,
            loads_nixl=loads_nixl,
        )
        try:
            listener = bound_socket(host, 0)
        except OSError as error:
            raise ConfigError(f"host: cannot listen on {host}: {error}; give an address of this machine") from None
        transport._server = await asyncio.start_server(transport._accept, sock=listener, limit=frames.MAX_FRAME_BYTES)
        port = transport._server.sockets[0].getsockname()[1]
        transport.address = transport.common_address = Address(advertise_host, port, transport._key).encode()
        return transport

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> LandingEntry:
        return self._landings.expect(reservation, generation, pages, segments)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> NixlPeer:
        where, page_bytes = Address.decode(address), page_bytes or self._memory.page_bytes
        connection = await self._dial(where, page_bytes, same_host=self._same_host)
        if isinstance(connection.error, ForbiddenError):
            log.warning("pages go to %s over the network also on this machine: %s", where.host, connection.error)
            connection = await self._dial(where, page_bytes, same_host=False)
        if connection.error is not None:
            text = f"no connection to {join_address(where.host, where.port)}: {connection.error}"
            raise type(connection.error)(text) from None
        if connection.streams:
            log.info(
                "pages go to %s in a TCP stream: only one of the two workers uses NIXL",
                join_address(where.host, where.port),
            )
        return NixlPeer(connection, self._memory, page_bytes)

    async def _dial(self, where: Address, page_bytes: int, *, same_host: bool) -> Outgoing:
        try:
            async with asyncio.timeout(GREETING_S):
                streams = await asyncio.open_connection(await resolve(where.host), where.port)
        except OSError as error:  # a TimeoutError is one; asyncio's has no text
            text = str(error) or f"no answer for {GREETING_S:g} s; a firewall may drop what is sent to this port"
            raise TransferError(f"no connection to {join_address(where.host, where.port)}: {text}") from None
        connection = Outgoing(
            *streams,
            self._outgoing_gone,
            self._device_host,
            self._memory,
            page_bytes,
            where,
            same_host=same_host,
            loads_nixl=self._loads_nixl,
        )
        self._connections.add(connection)
        if self._closed:
            connection.fail("the transport was closed")
        try:
            await connection.greeted.wait()
        except asyncio.CancelledError:
            connection.fail("connecting was cancelled")
            raise
        return connection

    async def close(self) -> None:
        """See `kvtransfer.base.Transport.close`. Waits as long as a sender may be writing: see `incoming.py`."""
        self._closed = True
        self._landings.close("the transport was closed")
        await self._end_connections()  # it still listens, for close notices
        await asyncio.gather(*self._close_notices)
        await stop_listening(self._server)
        await self._end_connections()

    async def _end_connections(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.fail("the transport was closed")
        for connection in connections:
            await connection.gone.wait()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        if not self._server.is_serving():
            writer.close()
            return
        callbacks = self._connections.discard, self._sender_closed
        connection = Incoming(
            reader,
            writer,
            *callbacks,
            self._device_host,
            self._landings,
            self._memory,
            self._key,
            loads_nixl=self._loads_nixl,
        )
        self._connections.add(connection)

    def _sender_closed(self, connection_id: bytes) -> None:
        for connection in [each for each in self._connections if isinstance(each, Incoming)]:
            if connection.sender is not None and connection.sender.connection_id == connection_id:
                connection.sender_closed()

    def _outgoing_gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        assert isinstance(connection, Outgoing)
        if connection.needs_close_notice and connection.receiver is not None:
            notice = give_close_notice(connection.where, connection.connection_id, connection.receiver)
            task = asyncio.create_task(notice, name="nixl-close-notice")
            self._close_notices.add(task)
            task.add_done_callback(self._close_notices.discard)

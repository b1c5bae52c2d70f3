"""Messages in both directions over one TCP connection, with TLS where other machines reach it (`cpd/common/tls.py`).

Each message is preceded by its length (4 bytes, little-endian). The two largest lengths stand alone: a heartbeat, and
the end of one side's messages. Nothing else is on the wire: the caller's name and the reason of an end are messages,
too. A stream ends when one side closes it.

A stopped peer, or one with a broken machine, is noticed within LOST_TICKS * TICK_S.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, Self, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from cpd.common.addresses import bound_socket, join_address
from cpd.common.errors import CPDError
from cpd.common.tls import Certificate, client_context, split_address
from cpd.common.tls_reads import cheap_reads

TICK_S = 1.0
"""Longest time between two things sent."""

SILENT_TICKS = 2
"""A peer is silent after this many ticks without data. It may come back, but then TCP needs up to as long again to
resend what was lost."""

LOST_TICKS = 7
"""A peer is lost after this many ticks without data. They are counted, not measured, so that a process that was stopped
itself reads first."""

UNREAD_BYTES = 4 << 20
"""Reading pauses while more than this waits to be received."""

TLS_S = 10.0
"""Time limit for a client's TLS handshake."""

MAX_MESSAGE_BYTES = 64 << 20
"""Size limit of a message from an authenticated peer. A prompt of a million tokens with its hashes is about 4 MiB."""

_HEAD_BYTES = 4
_ALIVE = b"\xff\xff\xff\xff"
_FINISHED = b"\xfe\xff\xff\xff"


class StreamError(CPDError):
    """The connection broke, or the peer is lost."""


class BrokenError(StreamError):
    """The connection broke: the peer's machine reset it, or can't be reached any more."""


class BadMessageError(StreamError):
    """The peer sent something that is not a message, or a message over the size limit."""


class Parsed(Protocol):
    """A protobuf message type."""

    @classmethod
    def FromString(cls, data: bytes, /) -> Self: ...  # noqa: N802


M = TypeVar("M", bound=Parsed)


class Stream(asyncio.Protocol, Generic[M]):
    """One end of a connection. All methods run on the event loop.

    Args:
        kind: Type of the peer's messages.
        max_bytes: Size limit of a message from the peer.
        opened: Called when the connection is made.
        certificate: Fingerprint of the server's certificate; empty without TLS.

    Attributes:
        certificate: As above.
        max_bytes: As above; it may be changed.
        heard_at: Loop time at which the peer's last data arrived, heartbeats included.
    """

    def __init__(
        self,
        kind: type[M],
        max_bytes: int,
        opened: "Callable[[Stream[M]], None] | None" = None,
        certificate: bytes = b"",
    ) -> None:
        self.max_bytes = max_bytes
        self.certificate = certificate
        self._kind = kind
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._transport: asyncio.Transport | None = None
        self._part = bytearray()  # of a message that has not arrived completely
        self._awaited_bytes = 0  # until `_part` has this many, nothing is parsed
        self._received: deque[tuple[M, int]] = deque()
        self._unread_bytes = 0
        self._reading = True
        self._waiter: asyncio.Future[None] | None = None
        self._error: StreamError | None = None
        self._ended = False
        self._closed = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._silent_ticks = 0
        self._sent = False
        self._finished = False
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    # ---- for the owner ----

    @property
    def peer(self) -> str:
        """The peer's address, for logs; empty once the stream is closed."""
        address = self._transport.get_extra_info("peername") if self._transport is not None else None
        return join_address(*address[:2]) if address else ""

    @property
    def silent(self) -> bool:
        """True if nothing has arrived for a while: another stream would reach the peer sooner."""
        return self._silent_ticks >= SILENT_TICKS

    def send(self, message: Message) -> None:
        """Sends a message without waiting. Does nothing if the stream is closed."""
        if self._transport is not None and not (self._finished or self._transport.is_closing()):
            data = message.SerializeToString()
            self._sent = True
            self._transport.write(len(data).to_bytes(_HEAD_BYTES, "little") + data)

    async def drained(self) -> None:
        """Waits while the peer reads too slowly, that is, while too much sent data is still buffered here."""
        await self._drained.wait()

    async def receive(self) -> M | None:
        """Returns the next message; None if the peer has closed the stream.

        Raises:
            StreamError: The connection broke, or the peer is lost.
        """
        while not self._received:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        message, size = self._received.popleft()
        self._unread_bytes -= size
        if not self._reading and not self._received and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return message

    def finish(self) -> None:
        """Ends sending. The stream closes when the peer, having read everything, closes it.

        Use it instead of `close` where the peer may be sending: `close` could then discard what it has not read yet.
        """
        if self._transport is not None and not (self._finished or self._transport.is_closing()):
            self._finished = True
            self._transport.write(_FINISHED)

    def close(self) -> None:
        """Closes the stream when everything has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the stream at once."""
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Returns when the connection is closed."""
        await self._closed.wait()

    # ---- for the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        self.heard_at = self._loop.time()
        if self._part:
            self._part += data
            if len(self._part) < self._awaited_bytes:
                return
            data = bytes(self._part)
        start, size, self._awaited_bytes = 0, len(data), 0
        while size - start >= _HEAD_BYTES:
            begin = start + _HEAD_BYTES
            head = data[start:begin]
            if head == _ALIVE:
                start = begin
                continue
            if head == _FINISHED:
                self._end(None)
                self.close()
                return
            length = int.from_bytes(head, "little")
            if length > self.max_bytes:
                self._fail(BadMessageError(f"it sent a message of {length} bytes; the limit is {self.max_bytes}"))
                return
            end = begin + length
            if end > size:
                self._awaited_bytes = end - start
                break
            try:
                message = self._kind.FromString(data[begin:end])
            except DecodeError as error:
                self._fail(BadMessageError(f"it sent something that is not a message: {error}"))
                return
            self._received.append((message, length))
            self._unread_bytes += length
            start = end
        self._part = bytearray(data[start:])
        if self._received:
            self._wake()
        if self._reading and self._unread_bytes > UNREAD_BYTES:
            self._reading = False
            assert self._transport is not None
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._ticker.cancel()
        self._transport = None
        self._end(BrokenError(f"the connection broke: {error}") if error is not None else None)
        self._drained.set()
        self._closed.set()

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    # ---- inside ----

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        if self._transport is None or self._transport.is_closing():
            return
        if not (self._sent or self._finished):
            self._transport.write(_ALIVE)
        self._sent = False
        self._silent_ticks += self._reading
        if self._silent_ticks >= LOST_TICKS:
            self._fail(StreamError(f"it sent nothing for {LOST_TICKS * TICK_S:g} s"))

    def _fail(self, error: StreamError) -> None:
        self._end(error)
        self.abort()

    def _end(self, error: StreamError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(address: str, kind: type[M], max_bytes: int) -> Stream[M]:
    """Connects to the server at `host:port`, or with TLS at `host:port#fingerprint`.

    Raises:
        OSError: It can't be reached, or has another certificate.
    """
    host, port, fingerprint = split_address(address)
    loop, stream = asyncio.get_running_loop(), Stream(kind, max_bytes, certificate=fingerprint)
    try:
        tls = client_context(fingerprint) if fingerprint else None
        await loop.create_connection(lambda: cheap_reads(stream, tls=tls is not None), host, port, ssl=tls)
    except BaseException:
        # uvloop does not call this here, even if it has already called connection_made
        stream.connection_lost(None)
        raise
    return stream


class StreamServer(Generic[M]):
    """Serves streams.

    Args:
        kind: Type of the peers' messages.
        max_bytes: Initial size limit of a message.
        handle: Serves one stream, which is closed when it returns or raises.
    """

    def __init__(self, kind: type[M], max_bytes: int, handle: Callable[[Stream[M]], Awaitable[None]]) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, certificate: Certificate | None = None) -> int:
        """Listens and returns the port; port 0 takes a free one. With a certificate, it listens with TLS.

        Raises:
            OSError: The address can't be used.
        """
        loop = asyncio.get_running_loop()
        fingerprint = certificate.fingerprint if certificate is not None else b""

        def stream() -> asyncio.BaseProtocol:
            made = Stream(self._kind, self._max_bytes, self._opened, fingerprint)
            return cheap_reads(made, tls=certificate is not None)

        self._server = await loop.create_server(
            stream,
            sock=bound_socket(host, port),
            ssl=certificate.context if certificate is not None else None,
            ssl_handshake_timeout=TLS_S if certificate is not None else None,
        )
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def close(self, timeout_s: float = 0.0) -> None:
        """Accepts no more streams, and ends the remaining ones after `timeout_s`."""
        self._closed = True
        if self._server is not None:
            await stop_listening(self._server)
        tasks = set(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _opened(self, stream: Stream[M]) -> None:
        if self._closed:
            stream.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream), name="stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: Stream[M]) -> None:
        try:
            await self._handle(stream)
        finally:
            stream.close()


async def stop_listening(server: asyncio.Server) -> None:
    """Closes a server; its connections go on.

    asyncio leaks a connection that it accepts in the loop iteration in which the server closes (CPython issue 109564).
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await asyncio.sleep(0)  # connections accepted in this iteration are served in the next one
    server.close()

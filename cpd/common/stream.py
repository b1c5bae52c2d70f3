"""Messages in both directions over one TCP connection.

Before each message comes its length (4 bytes, little-endian); the largest length there is, without a message, says that
the process runs. Nothing else is on the wire: who calls, and why a stream ends, are messages, too. A stream ends when
one side closes it.

A peer that is stopped, or whose machine is gone, is noticed within LOST_TICKS * TICK_S.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, Self, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from cpd.common.errors import CPDError

TICK_S = 1.0
"""Something is sent at least so often."""

SILENT_TICKS = 2
"""A peer of which nothing came for so many ticks may come back. Even then TCP takes its time, up to as long again, to
send what was lost, before anything else."""

LOST_TICKS = 7
"""A peer of which nothing came for so many ticks is lost. Counted, not measured: who was stopped itself reads first."""

UNREAD_BYTES = 4 << 20
"""Nothing more is read from the connection while so much waits to be received."""

_HEAD_BYTES = 4
_ALIVE = b"\xff" * _HEAD_BYTES


class StreamError(CPDError):
    """The connection broke, or the peer is lost."""


class BadMessageError(StreamError):
    """The peer sent what is no message, or a longer one than it may."""


class Parsed(Protocol):
    """A type of messages."""

    @classmethod
    def FromString(cls, data: bytes, /) -> Self: ...  # noqa: N802


M = TypeVar("M", bound=Parsed)


class Stream(asyncio.Protocol, Generic[M]):
    """One end of a connection. All methods are for the event loop.

    Args:
        kind: What the peer sends.
        most_bytes: Of a message of the peer's.

    Attributes:
        most_bytes: May be changed.
    """

    def __init__(self, kind: type[M], most_bytes: int, opened: "Callable[[Stream[M]], None] | None" = None) -> None:
        self.most_bytes = most_bytes
        self._kind = kind
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._part = bytearray()  # of a message that has not come as a whole
        self._awaited_bytes = 0  # before that many have come of it, `_part` only grows
        self._received: deque[tuple[M, int]] = deque()
        self._unread_bytes = 0
        self._reading = True
        self._waiter: asyncio.Future[None] | None = None
        self._error: StreamError | None = None
        self._ended = False
        self._closed = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._quiet_ticks = 0
        self._sent = False
        self._finished = False
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    # ---- for its owner ----

    @property
    def silent(self) -> bool:
        """Whether nothing has come for a while: if the peer can be reached at all, then sooner by another stream."""
        return self._quiet_ticks >= SILENT_TICKS

    def send(self, message: Message) -> None:
        """Sends a message at once, or as soon as the connection takes it; where it is closed, nothing happens."""
        if self._transport is not None and not (self._finished or self._transport.is_closing()):
            data = message.SerializeToString()
            self._sent = True
            self._transport.write(len(data).to_bytes(_HEAD_BYTES, "little") + data)

    async def drained(self) -> None:
        """Waits while the peer is behind: much of what was sent could not be handed to the connection."""
        await self._drained.wait()

    async def receive(self) -> M | None:
        """The next message; None: the peer has closed the stream.

        Raises:
            StreamError: There will be none.
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
        """Says that nothing more will be sent. The stream closes when the peer, who has read all by then, closes it.

        `close` may take from the peer what it has not read yet, if it sends something at the same time.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._finished = True
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset the connection, which the event loop has not seen yet
                self.abort()

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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        self._quiet_ticks = 0
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
            length = int.from_bytes(head, "little")
            if length > self.most_bytes:
                self._fail(BadMessageError(f"it sent a message of {length} bytes, and the most is {self.most_bytes}"))
                return
            end = begin + length
            if end > size:
                self._awaited_bytes = end - start
                break
            try:
                message = self._kind.FromString(data[begin:end])
            except DecodeError as error:
                self._fail(BadMessageError(f"it sent what is no message: {error}"))
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
        self._end(StreamError(f"the connection broke: {error}") if error is not None else None)
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
        self._quiet_ticks += self._reading
        if self._quiet_ticks >= LOST_TICKS:
            self._fail(StreamError(f"nothing was heard of it for {LOST_TICKS * TICK_S:g} s"))

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


async def connect(address: str, kind: type[M], most_bytes: int) -> Stream[M]:
    """A stream to whoever serves at `host:port`.

    Raises:
        OSError: Nobody does.
    """
    host, _, port = address.rpartition(":")
    loop, stream = asyncio.get_running_loop(), Stream(kind, most_bytes)
    try:
        await loop.create_connection(lambda: stream, host.strip("[]"), int(port))
    except BaseException:
        # uvloop tells a protocol nothing of this, even where it has just told it of the connection
        stream.connection_lost(None)
        raise
    return stream


class StreamServer(Generic[M]):
    """Serves streams.

    Args:
        kind: What peers send.
        most_bytes: Of a message of theirs, at first.
        handle: Serves one; it is closed when that returns or raises.
    """

    def __init__(self, kind: type[M], most_bytes: int, handle: Callable[[Stream[M]], Awaitable[None]]) -> None:
        self._kind = kind
        self._most_bytes = most_bytes
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which is a free one where `port` is 0.

        Raises:
            OSError: The address can't be used.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Stream(self._kind, self._most_bytes, self._opened), host.strip("[]"), port
        )
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def close(self, timeout_s: float = 0.0) -> None:
        """Takes no more streams, and ends those that there still are after a while."""
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

    asyncio's forgets, open, what it accepts in the turn in which it is closed (CPython issue 109564).
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await asyncio.sleep(0)  # what was accepted in this turn is served in the next one
    server.close()

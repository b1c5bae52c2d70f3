"""uvicorn's HTTP connection, with eight additions.

- The head of a response is written together with the start of its body, so that the client wakes up once.
- A callback reports that the client hung up. uvicorn's own way needs a task for each request.
- The size of a request's head and the time until it is complete are limited.
- The number of connections of each client is limited.
- A client that reads nothing of its response for WRITE_S is cut off.
- A request that is not valid HTTP gets an error in OpenAI's format, also if only its body is not.
- A wish to change to another protocol is ignored, as HTTP/1.1 allows. Java's HTTP client sends `Upgrade: h2c` with
  every first request; the parser would leave the body out, and take it for the next request.
- The number of requests that wait for the response to an earlier one is limited.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from router.api.client_limit import ClientLimit
from router.errors import ApiError, invalid

HEAD_BYTES = 1 << 16
"""Maximum number of bytes between two pieces of bodies: a request's head, or the framing of chunks."""

HEAD_S = 60.0
"""Time limit for a request's head in seconds, from the connection's start or the first byte of a later request."""

WRITE_S = 60.0
"""Time in which a client must read something of a response that waits for it, in seconds."""

MAX_PIPELINED = 100
"""Maximum number of requests on a connection that wait for the response to an earlier one."""

_STATE = "connection"
"""The connection's key in a request's state."""


class ConnectionsState(ServerState):
    """What the connections of a server share.

    Attributes:
        posts: Number of POST requests so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.posts = 0


class Connection(HttpToolsProtocol):
    """One connection.

    Args:
        clients: Counts the connections of each client.
    """

    def __init__(self, *args: Any, clients: ClientLimit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clients = clients
        self._client: str | None = None  # as counted
        self._unread: asyncio.TimerHandle | None = None

    server_state: ConnectionsState

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = HoldingTransport(transport)
        self._hang_up: Callable[[], None] | None = None
        self._head_bytes = 0  # bytes since the last head or the last piece of a body
        self._in_head = False
        self._closes = False
        super().connection_made(cast(asyncio.Transport, self._writes))
        self._head_late = self._expect_head()
        client = self._clients.client(self.client[0]) if self.client else None
        if client is not None:
            try:
                self._clients.open(client)
                self._client = client
            except ApiError as error:
                self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._head_late.cancel()
        self.resume_writing()
        if self._client is not None:
            self._clients.close(self._client)
        super().connection_lost(error)
        if self._hang_up is not None:
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the connection was idle: a new request begins
            self._head_late.cancel()
            self._head_late = self._expect_head()
        start = 0
        while start < len(data):
            piece = data[start : start + HEAD_BYTES - self._head_bytes]  # a longer head must not become complete
            start += len(piece)
            self._head_bytes += len(piece)
            self._parse(piece)
            if self._head_bytes == HEAD_BYTES:  # the end of a head, or a body, would have reset it
                message = f"The request has more than {HEAD_BYTES} bytes outside its body; shorten its URL and headers."
                self._refuse(invalid(None, message, code="request_too_large", status=431))
                return

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # after the head, whatever follows
            self._parse(self._head_without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope["state"][_STATE] = self

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # the head comes again without it
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # to the parser: the request is refused
            return
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests wait")
        self._head_bytes = 0
        self._in_head = False
        self._head_late.cancel()
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"  # whose clients know no 100
        super().on_headers_complete()
        self.server_state.posts += self.scope["method"] == "POST"
        if self._closes:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head:  # part of the next head has arrived already
            self._head_late = self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid(None, "The request is not valid HTTP.", code="invalid_http"))

    def _expect_read(self) -> None:
        self._unread = self.loop.call_later(WRITE_S, self._check_read, self.transport.get_write_buffer_size())

    def _check_read(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._expect_read()
        else:
            self.transport.abort()

    def _expect_head(self) -> asyncio.TimerHandle:
        return self.loop.call_later(HEAD_S, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        message = f"The request did not arrive within {HEAD_S:g} s."
        self._refuse(invalid(None, message, code="request_timeout", status=408))

    def _refuse(self, error: ApiError) -> None:
        """Sends the error, unless part of a response or an earlier one must come first, and closes the connection."""
        cycle = self.cycle
        in_body = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if in_body:
            cycle.disconnected = True  # the application must not send a second response
            cycle.message_event.set()
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete or in_body):
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def close_after_response(self) -> None:
        """Closes the connection after its next response, or the one under way if that has not started."""
        self._closes = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    @property
    def has_all(self) -> bool:
        """True if the last request has arrived completely."""
        return not self.cycle.more_body

    def hold(self) -> None:
        """Holds the next write back until the one after it."""
        self._writes.hold = True

    @contextlib.contextmanager
    def on_hang_up(self, call: Callable[[], None]) -> Iterator[None]:
        """Within the context, calls `call` when the client hangs up; at once if it already has."""
        self._hang_up = call
        self.flow.resume_reading()  # a long request may have paused reading, which hides the hang-up
        if self.transport.is_closing():
            call()
        try:
            yield
        finally:
            self._hang_up = None


def connection_of(scope: Scope) -> Connection:
    """The connection on which a request arrived."""
    connection: Connection = scope["state"][_STATE]
    return connection


class HoldingTransport:
    """A transport that can hold a write back until the one after it.

    Attributes:
        hold: Whether to hold the next write back.
    """

    __slots__ = ("_held", "_transport", "hold")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.hold = False

    def write(self, data: bytes) -> None:
        """Writes the data held back and `data`, or holds both back."""
        data, self._held = self._held + data, b""
        if self.hold:
            self._held, self.hold = data, False
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Writes the data held back and closes the connection."""
        self.hold = False
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

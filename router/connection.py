"""uvicorn's connections, which can write the head of a response with the first of its body, and tell of a hang-up.

uvicorn writes one after the other, so that a client wakes up for the head and again for what it waits for; and to learn
from it that a client is gone takes a task that waits for that. Nor does it mind how long a request's head is, or how
long it takes to come.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.errors import ApiError, invalid

HEAD_BYTES = 1 << 16
"""What comes between two pieces of bodies may be so long: a request's head, what is written around chunks."""

HEAD_S = 60.0
"""From the start of a connection, or the first byte of a later request, to the end of the head, in seconds."""

_STATE = "connection"
"""Its name in the state of a request."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = HoldingTransport(transport)
        self._hang_up: Callable[[], None] | None = None
        self._beside_bodies = 0  # bytes since the last piece of one, or the last head
        self._in_head = False
        super().connection_made(cast(asyncio.Transport, self._writes))
        self._head_late = self._expect_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_late.cancel()
        super().connection_lost(error)
        if self._hang_up is not None:
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # uvicorn's clock for connections that wait: it ends now
            self._head_late.cancel()
            self._head_late = self._expect_head()
        self._beside_bodies += len(data)
        super().data_received(data)
        if self._beside_bodies > HEAD_BYTES:
            message = f"The request has more than {HEAD_BYTES} bytes beside its body."
            self._refuse(invalid(None, message, code="request_too_large", status=431))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope["state"][_STATE] = self

    def on_headers_complete(self) -> None:
        self._beside_bodies = 0
        self._in_head = False
        self._head_late.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_bodies = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head:  # a part of the next one has come already
            self._head_late = self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid(None, "The request is not valid HTTP.", code="invalid_http"))

    def _expect_head(self) -> asyncio.TimerHandle:
        return self.loop.call_later(HEAD_S, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        message = f"The request did not come within {HEAD_S:g} s."
        self._refuse(invalid(None, message, code="request_timeout", status=408))

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection, and says why where no response is under way."""
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    @property
    def has_all(self) -> bool:
        """Whether all of the last request has come, and so of those before it."""
        return not self.cycle.more_body

    def hold(self) -> None:
        """The next write is to go out with the one after it."""
        self._writes.hold = True

    @contextlib.contextmanager
    def on_hang_up(self, call: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `call` is called when the client hangs up; at once, if it has."""
        self._hang_up = call
        self.flow.resume_reading()  # a long request may have paused it, and then the end isn't seen
        if self.transport.is_closing():
            call()
        try:
            yield
        finally:
            self._hang_up = None


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came on."""
    connection: Connection = scope["state"][_STATE]
    return connection


class HoldingTransport:
    """A transport on which a write can be held until the one after it.

    Attributes:
        hold: The next one is.
    """

    __slots__ = ("_held", "_transport", "hold")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.hold = False

    def write(self, data: bytes) -> None:
        """Writes what was held, and `data`; or holds it."""
        data, self._held = self._held + data, b""
        if self.hold:
            self._held, self.hold = data, False
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Closes the connection when everything has been written."""
        self.hold = False
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""uvicorn's connections, which can write the head of a response with the first of its body, and tell of a hang-up.

uvicorn writes one after the other, so that a client wakes up for the head and again for what it waits for; and to learn
from it that a client is gone takes a task that waits for that.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_STATE = "connection"
"""Its name in the state of a request."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = HoldingTransport(transport)
        self._hang_up: Callable[[], None] | None = None
        super().connection_made(cast(asyncio.Transport, self._writes))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._hang_up is not None:
            self._hang_up()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][_STATE] = self

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

"""uvicorn's connections, but that a response's head may go out with the first of its body, in one write.

uvicorn writes them one after the other, so that a client wakes up for the head and again for what it waits for.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HOLD = "cpd.hold"
"""What a request's state has to be called before the start of a response that a body follows."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._held = HoldingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._held))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][HOLD] = self._held.hold


class HoldingTransport:
    """A transport on which a write can be held until the one after it."""

    __slots__ = ("_hold", "_part", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._hold = False
        self._part = b""

    def hold(self) -> None:
        """The next write goes out with the one after it."""
        self._hold = True

    def write(self, data: bytes) -> None:
        """Writes what was held and `data`, or holds it."""
        if self._hold:
            self._hold, self._part = False, self._part + data
        elif self._part:
            part, self._part = self._part, b""
            self._transport.write(part + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Closes the connection when everything has been written."""
        self._hold = False
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

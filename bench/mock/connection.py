"""One connection of the mock server. Requests are not pipelined: a client waits for the answer."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

import httptools

OnRequest = Callable[["Connection", str, str, dict[str, str], bytes], None]
"""(connection, method, path, headers with names in lower case, body)"""


class Connection(asyncio.Protocol):
    """A connection, until `closed`. Calls `on_request` with each whole request."""

    def __init__(self, on_request: OnRequest) -> None:
        self.closed = False
        self._transport: asyncio.Transport
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self.on_message_begin()

    def write(self, data: bytes) -> None:
        """Sends `data`."""
        if not self.closed:
            self._transport.write(data)

    def close(self, reset: bool = False) -> None:
        """Closes the connection after everything written is sent; with `reset` at once and with an error."""
        if reset:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._on_request(self, method, self._url.decode("latin-1"), self._headers, bytes(self._body))

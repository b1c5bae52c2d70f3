"""One connection of the mock server: requests in, bytes out. No pipelining: a client waits for the answer."""

import select
import socket
import struct
from collections.abc import Callable

import httptools

READ_BYTES = 1 << 18

OnRequest = Callable[["Connection", str, str, dict[str, str], bytes], None]
"""(connection, method, path, headers with names in lower case, body)"""


class Connection:
    """A connection, until `closed`.

    Args:
        sock: The accepted socket.
        epoll: Where it registers itself.
        on_request: Called with each whole request.
        on_close: Called with the file descriptor, before that is closed.
    """

    def __init__(
        self, sock: socket.socket, epoll: select.epoll, on_request: OnRequest, on_close: Callable[[int], object]
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        epoll.register(sock, select.EPOLLIN)
        self.closed = False
        self._socket = sock
        self._epoll = epoll
        self._on_request = on_request
        self._on_close = on_close
        self._unsent = bytearray()
        self._closes_when_sent = False
        self._parser = httptools.HttpRequestParser(self)
        self.on_message_begin()

    def ready(self, events: int) -> None:
        """Reads and writes what the socket is ready for."""
        if events & select.EPOLLOUT:
            self._flush()
        if not self.closed and events & ~select.EPOLLOUT:
            self._read()

    def write(self, data: bytes) -> None:
        """Sends `data`, what the socket doesn't take yet as soon as it does."""
        if self.closed:
            return
        if self._unsent:
            self._unsent += data
        elif (sent := self._send(data)) < len(data):
            self._unsent += data[sent:]
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def close(self, reset: bool = False) -> None:
        """Ends the connection once everything written is sent, or, with `reset`, at once and with an error."""
        if self.closed:
            return
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self._unsent:
            self._closes_when_sent = True
            return
        self._end()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                self._end()
                return
            self._parser.feed_data(data)
        except BlockingIOError:
            return
        except (OSError, httptools.HttpParserError):
            self._end()

    def _flush(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and not self.closed:
            self._epoll.modify(self._socket, select.EPOLLIN)
            if self._closes_when_sent:
                self._end()

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes of it the socket took."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._end()
            return len(data)

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._on_close(self._socket.fileno())
        self._epoll.unregister(self._socket)
        self._socket.close()

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

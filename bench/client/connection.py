"""One HTTP/1.1 connection: sends requests one after another, and gives timestamped data to a response.

States: connected → exchange → idle → exchange → … → lost. It closes as soon as something happens that could affect the
next exchange; an exchange on a lost connection is refused.
"""

import asyncio
import time
from typing import cast

import httptools

from bench.client.errors import RequestError, StaleConnectionError
from bench.client.response import Response
from bench.record import Failure

# Time for a response to end after its last event.
_LINGER_S = 1.0
# A connection lost sooner than this after sending was closed before the request arrived; later, the request is lost.
_STALE_S = 1.0
_CLOSED = "the server closed the connection"
# Limit of headers, interim responses and chunk extensions between two pieces of a body.
_MAX_HEAD_BYTES = 256 << 10


class Connection(asyncio.Protocol):
    """A connection to the server, made by `loop.create_connection`."""

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._response: Response | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._sent_s = 0.0
        self._heard_s = 0.0
        self._head_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._interim = False
        self._satisfied = False
        self._ends_with_connection = False

    async def exchange(self, request: bytes, response: Response, timeout_s: float) -> None:
        """Sends a request and returns when `response` has the whole answer. Cancelling closes the connection.

        Raises:
            StaleConnectionError: The connection was lost before or as soon as it was used. `response` got nothing.
            RequestError: Nothing of the answer came for `timeout_s`, the connection was lost, the answer is not HTTP,
                or `response` raised it.
        """
        if self._transport.is_closing():
            raise StaleConnectionError(Failure.DISCONNECTED, _CLOSED)
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._response = response
        self._timeout_s = timeout_s
        self._satisfied = self._ends_with_connection = False
        self._head_bytes = 0
        self._sent_s = self._heard_s = time.perf_counter()
        self._timer = loop.call_later(timeout_s, self._check_silence)
        self._transport.write(request)
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._timer.cancel()
            self._response = None

    def abort(self) -> None:
        """Closes the connection at once; `lost` is done soon after."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop. Everything in `data` gets the time of this call."""
        self._heard_s = time.perf_counter()
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # one of the methods below raised
            self._end(error.__context__)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(RequestError(Failure.MALFORMED, f"the answer is not HTTP: {error}"))
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._end(RequestError(Failure.MALFORMED, f"more than {_MAX_HEAD_BYTES} bytes of HTTP headers"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.lost.set_result(None)
        detail = str(exc or _CLOSED)
        if self._satisfied or (self._ends_with_connection and exc is None):
            self._end(None)
        elif self._heard_s == self._sent_s and time.perf_counter() - self._sent_s < _STALE_S:
            self._end(StaleConnectionError(Failure.DISCONNECTED, detail))
        else:
            self._end(RequestError(Failure.DISCONNECTED, detail))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._response is None:
            raise RequestError(Failure.MALFORMED, "the server sent data without a request")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            return
        chunked = b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()
        self._ends_with_connection = not chunked and b"content-length" not in self._headers
        if self._response is not None:
            self._response.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._head_bytes = 0
        if self._response is not None and not self._satisfied and self._response.body(data, self._heard_s):
            self._satisfied = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self.abort)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._interim:
            self._end(None)

    def _end(self, failure: BaseException | None) -> None:
        """Ends the exchange, if there is one. The connection stays open if both messages are complete."""
        if failure is not None or self._transport.get_write_buffer_size() or not self._parser.should_keep_alive():
            self._transport.abort()
        self._response = None
        if self._waiter is not None and not self._waiter.done():
            if failure is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(failure)

    def _check_silence(self) -> None:
        if self._response is None:
            return  # it has just ended
        silent_s = time.perf_counter() - max(self._sent_s, self._response.came_s)
        if silent_s >= self._timeout_s:
            self._end(RequestError(Failure.TIMEOUT, f"nothing came for {self._timeout_s:g} s"))
        else:
            left_s = self._timeout_s - silent_s
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check_silence)

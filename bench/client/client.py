"""Sends streaming requests and measures the answers at the socket."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import orjson

from bench.client.connection import Connection
from bench.client.errors import RequestError, StaleConnectionError
from bench.client.response import PlainBody, Response, StreamedAnswer
from bench.client.target import Target
from bench.errors import BenchError
from bench.record import Failure, Record
from bench.workloads.base import Message
from cpd.common.tls_reads import cheap_reads


class Client:
    """Sends requests to one server on one event loop. Has a connection per concurrent request and reuses idle ones.

    Args:
        target: The server.
        count: Counts the tokens of a text. Used for `Record.output_tokens` if the server sends no usage.
    """

    def __init__(self, target: Target, count: Callable[[str], int] | None = None) -> None:
        self._target = target
        self._count = count
        parts = urlsplit(target.url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path
        self._headers = f"Host: {parts.netloc}\r\nUser-Agent: cpd-bench\r\nAccept-Encoding: identity\r\n"
        if target.api_key:
            self._headers += f"Authorization: Bearer {target.api_key}\r\n"
        self._addresses: list[str] = []
        self._resolving = asyncio.Lock()
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []

    async def stream(self, record: Record, conversation: Sequence[Message]) -> str:
        """Sends one streaming request for `record.output_len` tokens and fills `record` while the answer arrives.

        Failures of the server do not raise; they are in `record.error`. Cancelling closes the connection and sets
        `Failure.ABORTED`.

        Returns:
            The text of the answer so far, without reasoning.
        """
        request = self._request("POST", self._target.path, self._target.body(conversation, record.output_len))
        answer = StreamedAnswer(record, self._count)
        failure: RequestError | None = None
        record.sent_s = time.perf_counter()
        try:
            await self._exchange(request, answer)
            answer.check(time.perf_counter())
        except RequestError as error:
            failure = error
        except asyncio.CancelledError:
            complete = answer.done and record.content_s
            failure = None if complete else RequestError(Failure.ABORTED, "")
            raise
        finally:
            answer.settle(time.perf_counter(), failure)
        return answer.text

    async def get_json(self, path: str) -> tuple[int, Any]:
        """Gets a small JSON document.

        Args:
            path: Path under the server's URL, with its leading slash.

        Returns:
            The HTTP status and the document. With a status other than 200, the text of a body that is not JSON.

        Raises:
            BenchError: The server cannot be reached, or its answer is not JSON.
        """
        response = PlainBody()
        url = f"{self._target.url}{path}"
        try:
            await self._exchange(self._request("GET", path), response)
        except RequestError as error:
            raise BenchError(
                f"no answer from {url} ({error.detail}). Is the server running, and is --url right?"
            ) from None
        try:
            return response.status, orjson.loads(response.data)
        except orjson.JSONDecodeError:
            text = response.data.decode(errors="replace")
            if response.status != 200:
                return response.status, text
            raise BenchError(f"the answer of {url} is not JSON: {text[:100]!r}. Is --url right?") from None

    async def close(self) -> None:
        """Closes all connections. No request may be in flight."""
        for connection in self._connections:
            connection.abort()
        await asyncio.gather(*(connection.lost for connection in self._connections))

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body

    async def _exchange(self, request: bytes, response: Response) -> None:
        if self._idle:
            with suppress(StaleConnectionError):
                return await self._use(self._idle.pop(), request, response)
        return await self._use(await self._connect(), request, response)

    async def _use(self, connection: Connection, request: bytes, response: Response) -> None:
        await connection.exchange(request, response, self._target.timeout_s)
        self._idle.append(connection)

    async def _connect(self) -> Connection:
        """Opens a connection.

        Raises:
            RequestError: No address of the host accepts one.
        """
        failure = RequestError(Failure.CONNECT, f"{self._host} has no address")
        for address in await self._resolve():
            try:
                connection = await self._connect_to(address)
            except OSError as error:
                reason = str(error) or f"no connection within {self._target.timeout_s:g} s"
                failure = RequestError(Failure.CONNECT, f"{address} port {self._port}: {reason}")
                continue
            if address != self._addresses[0]:  # such as localhost, if the server listens on one of its addresses
                self._addresses = [address]
            return connection
        raise failure

    async def _connect_to(self, address: str) -> Connection:
        async with asyncio.timeout(self._target.timeout_s):
            connection = Connection()
            await asyncio.get_running_loop().create_connection(
                lambda: cheap_reads(connection, tls=self._tls is not None),
                address,
                self._port,
                ssl=self._tls,
                server_hostname=self._host if self._tls else None,
            )
        self._connections.add(connection)
        connection.lost.add_done_callback(lambda _: self._connections.discard(connection))
        return connection

    async def _resolve(self) -> list[str]:
        """The host's addresses, looked up once, so that look-ups are not measured."""
        async with self._resolving:
            if not self._addresses:
                try:
                    found = await asyncio.get_running_loop().getaddrinfo(
                        self._host, self._port, type=socket.SOCK_STREAM
                    )
                except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name
                    raise RequestError(Failure.CONNECT, f"{self._host}: {error}") from None
                self._addresses = [str(address[0]) for *_, address in found]
        return self._addresses

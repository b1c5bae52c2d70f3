import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from router.api import connection as connections
from router.api.client_limit import ClientLimit
from router.api.connection import HEAD_BYTES, MAX_PIPELINED, Connection, ConnectionsState, connection_of

MOST = 40
"""Most connections of a client."""

Ask = Callable[[str], Awaitable[list[bytes]]]


class Client(asyncio.Protocol):
    """Records the data received, write by write: a small write arrives in one piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = asyncio.get_running_loop().create_future()
        self._more = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self._more.set()

    async def has(self, data: bytes) -> None:
        """Waits until a piece has this end."""
        while not any(piece.endswith(data) for piece in self.pieces):
            self._more.clear()
            await self._more.wait()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    connection = connection_of(scope)
    if scope["path"] in ("/waits", "/late"):
        await scope["state"]["waiting"].until_gone(connection, receive, late=scope["path"] == "/late")
        return
    if scope["path"] == "/long":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection.transport.is_closing():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        return
    if scope["path"] == "/starts":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
    while scope["path"] not in ("/ignores", "/echo") and (await receive()).get("more_body"):
        pass
    if scope["path"] == "/starts":
        return
    if scope["path"] == "/echo":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})
        return
    connection.hold()
    headers = [] if scope["path"] == "/stays" else [(b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/breaks":
        raise RuntimeError("a bug")
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


class Waiting:
    """A request that waits for its client to hang up."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def until_gone(self, connection: Connection, receive: Receive, *, late: bool) -> None:
        """Returns after the hang-up. With `late`, the client hangs up before the callback is set."""
        while (await receive()).get("more_body"):
            pass
        self.read.set()
        if late:
            assert (await receive())["type"] == "http.disconnect"
        with connection.on_hang_up(self.hung_up.set):
            await self.hung_up.wait()


@pytest.fixture
async def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
async def state() -> ConnectionsState:
    return ConnectionsState()


@pytest.fixture
async def port(waiting: Waiting, state: ConnectionsState) -> AsyncIterator[int]:
    """The port of a server of `app`."""
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop, clients = asyncio.get_running_loop(), ClientLimit(MOST)
    server = await loop.create_server(
        lambda: Connection(config, state, {"waiting": waiting}, clients=clients), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1]
    for connection in list(state.connections):
        connection.transport.abort()
    while state.connections:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    server.close()
    await server.wait_closed()


@pytest.fixture
async def ask(port: int) -> Ask:
    """Sends a request and returns the data received until the connection is closed."""
    loop = asyncio.get_running_loop()

    async def ask(path: str) -> list[bytes]:
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        transport.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        async with asyncio.timeout(10):
            await client.closed
        return client.pieces

    return ask


async def test_a_held_head_is_sent_with_the_start_of_the_body(ask: Ask) -> None:
    first, *_ = pieces = await ask("/")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"one" in first
    assert b"".join(pieces).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_a_held_head_without_a_body_is_sent_before_the_connection_is_closed(ask: Ask) -> None:
    pieces = await ask("/breaks")
    assert b"".join(pieces).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_an_idle_connection_can_be_closed_with_its_next_response(port: int, state: ConnectionsState) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        for last in (False, True):
            if last:
                for connection in state.connections:
                    assert isinstance(connection, Connection)
                    connection.close_after_response()
            writer.write(request("/stays"))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            assert (b"connection: close" in head) == last
        assert await reader.read() == b""
    assert state.posts == 2
    writer.close()


def request(path: str, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(request("/waits"), id="alone"),
        pytest.param(request("/waits") * 2, id="with-the-next-one-behind-it"),
        pytest.param(request("/waits", bytes(3_000_000)), id="long"),
        pytest.param(request("/late"), id="late"),
    ],
)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_hang_up_is_reported(port: int, waiting: Waiting, sent: bytes, reset: bool) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(10):
        await waiting.read.wait()
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
        writer.close()
        await waiting.hung_up.wait()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def chunked(path: str, encoding: str = "chunked") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {encoding}\r\n\r\n".encode()


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """Returns the data received until the connection is closed."""
    _, client = connection = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    async with asyncio.timeout(10):
        for piece in pieces:
            connection[0].write(piece)
            await asyncio.sleep(0)
        await client.closed
    return b"".join(client.pieces)


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nx: "], ids=repr)
async def test_a_head_without_an_end_is_refused(port: int, start: bytes) -> None:
    line = b"x: y\r\n" if start.endswith(b"\n") else b"xxxxxx"
    answer = await answer_to(port, start + line * (HEAD_BYTES // 2))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("rest", [b"1;", b"0\r\nx: "], ids=["extensions", "trailers"])
async def test_chunk_framing_without_a_body_is_refused(port: int, rest: bytes) -> None:
    answer = await answer_to(port, chunked("/waits"), rest, b"x" * 6 * HEAD_BYTES)
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("size", "status"), [(HEAD_BYTES, 200), (HEAD_BYTES + 1, 431), (2 * HEAD_BYTES, 431)])
async def test_a_complete_head_is_refused_if_it_is_too_large(port: int, size: int, status: int) -> None:
    start, end = b"GET / HTTP/1.1\r\nx: ", b"\r\n\r\n"
    answer = await answer_to(port, start + b"x" * (size - len(start + end)) + end)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_long_body_does_not_count_as_head(port: int) -> None:
    chunks = b"1\r\nx\r\n" * HEAD_BYTES + b"0\r\n\r\n"
    assert (await answer_to(port, chunked("/"), chunks)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"POST", b"POST / HTTP/1.1\r\nhost: x\r\n", b"\r\n"], ids=repr)
async def test_a_head_has_a_time_limit(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.connection.HEAD_S", 0.05)
    answer = await answer_to(port, sent)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("sent", [b"POST / HTTP/1.1\r\n", b"POST", b"\r\n"], ids=repr)
async def test_the_next_head_has_a_time_limit_from_its_first_byte(
    port: int, sent: bytes, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`early`: the head begins before the previous response was sent."""
    transport, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    monkeypatch.setattr("router.api.connection.HEAD_S", 0.05)
    async with asyncio.timeout(10):
        transport.write(request("/stays") + (sent if early else b""))
        await client.has(b"0\r\n\r\n")
        if not early or sent == b"\r\n":
            transport.write(sent)
        await client.closed
    response, _, refusal = b"".join(client.pieces).partition(b"0\r\n\r\n")
    assert response.endswith(b"3\r\none\r\n3\r\ntwo\r\n")
    assert refusal.startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_stays_open_for_longer_than_that(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and load balancers keep connections for the next request."""
    transport, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    monkeypatch.setattr("router.api.connection.HEAD_S", 0.01)
    async with asyncio.timeout(10):
        transport.write(request("/stays"))
        await client.has(b"0\r\n\r\n")
        await answer_to(port)  # returns when the server closes a connection without a head
        client.pieces.clear()
        transport.write(request("/stays"))
        await client.has(b"0\r\n\r\n")
    transport.close()


async def test_invalid_http_is_refused_in_openais_format(port: int) -> None:
    answer = await answer_to(port, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


INVALID_BODIES = (
    pytest.param([chunked("/"), b"zz\r\n"], id="chunk size"),
    pytest.param([chunked("/"), b"f" * 17 + b"\r\n"], id="chunk size over 64 bits"),
    pytest.param([chunked("/"), b"1\r\nxy\r\n"], id="chunk longer than its size"),
    pytest.param([chunked("/") + b"zz\r\n"], id="at once"),
    pytest.param([chunked("/ignores") + b"zz\r\n"], id="at once, and nobody reads the body"),
    pytest.param([chunked("/", "gzip")], id="not chunked"),
    pytest.param([chunked("/", "chunked, gzip")], id="not chunked last"),
    pytest.param([chunked("/", "chunked\r\ncontent-length: 1")], id="with a length"),
)


@pytest.mark.parametrize("sent", INVALID_BODIES)
async def test_a_body_that_is_not_valid_http_is_refused(port: int, sent: list[bytes]) -> None:
    answer = await answer_to(port, *sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_an_invalid_body_gets_no_second_response(port: int) -> None:
    transport, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    transport.write(chunked("/starts"))
    async with asyncio.timeout(10):
        await client.has(b"one\r\n")
        transport.write(b"zz\r\n")
        await client.closed
    assert b"".join(client.pieces).count(b"HTTP/1.1 ") == 1


async def test_an_invalid_body_is_not_refused_before_the_response_to_an_earlier_request(
    port: int, waiting: Waiting
) -> None:
    assert await answer_to(port, request("/waits") + chunked("/") + b"zz\r\n") == b""
    async with asyncio.timeout(10):
        await waiting.hung_up.wait()


UPGRADE = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


async def test_a_wish_to_upgrade_is_ignored_and_the_body_is_no_request(port: int) -> None:
    """Nor is it lost, however it arrives."""
    inner = request("/echo", b"inner")
    sent = request("/echo", inner).replace(b"\r\n\r\n", b"\r\n" + UPGRADE + b"\r\n", 1)
    sent += request("/echo", b"next") + b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    for cut in range(0, len(sent), 7):
        answer = await answer_to(port, sent[:cut], sent[cut:])
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert answer.index(inner) < answer.index(b"\r\nnext\r\n")


@pytest.mark.parametrize("more", [b"", UPGRADE])
async def test_it_is_no_proxy(port: int, more: bytes) -> None:
    answer = await answer_to(port, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n" + more + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("http", "statuses"), [("1.1", [b"100", b"200"]), ("1.0", [b"200"])])
async def test_only_clients_that_know_it_are_told_to_go_on(port: int, http: str, statuses: list[bytes]) -> None:
    head = f"POST / HTTP/{http}\r\nhost: x\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n".encode()
    assert re.findall(rb"HTTP/1\.1 (\d+)", await answer_to(port, head, b"x")) == statuses


async def test_few_requests_may_wait_for_an_earlier_one(port: int, waiting: Waiting) -> None:
    transport, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    transport.write(request("/waits") + b"GET / HTTP/1.1\r\n\r\n" * MAX_PIPELINED)
    async with asyncio.timeout(10):
        await waiting.read.wait()
        assert not client.closed.done()
        transport.write(b"GET / HTTP/1.1\r\n\r\n")
        await client.closed
        await waiting.hung_up.wait()


async def test_a_client_that_reads_nothing_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 0.05)
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", port)
    transport.pause_reading()
    transport.write(b"POST /long HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    async with asyncio.timeout(10):
        while not client.closed.done():
            transport.write(b"x")
            await asyncio.sleep(0.01)


async def test_a_client_that_reads_slowly_is_not_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    writer.write(b"POST /long HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    read = 0
    async with asyncio.timeout(30):
        while read < 20 << 20:
            read += len(await reader.read(1 << 20))
    writer.transport.abort()


async def test_a_client_with_too_many_connections_is_refused(port: int) -> None:
    loop = asyncio.get_running_loop()
    held = [await loop.create_connection(Client, "127.0.0.1", port) for _ in range(MOST)]
    async with asyncio.timeout(10):
        _, refused = await loop.create_connection(Client, "127.0.0.1", port)
        await refused.closed
        head, _, body = b"".join(refused.pieces).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        held[0][0].abort()
        while True:  # until the server has noticed
            transport, client = await loop.create_connection(Client, "127.0.0.1", port)
            transport.write(b"POST /stays HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            done, _ = await asyncio.wait(
                [client.closed, asyncio.ensure_future(client.has(b"two\r\n0\r\n\r\n"))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if client.closed not in done:
                transport.abort()
                held.append((transport, client))
                break
        for transport, client in held:
            transport.abort()
            await client.closed

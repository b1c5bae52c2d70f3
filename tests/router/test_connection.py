import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.connection import Connection, connection_of

Ask = Callable[[str], Awaitable[list[bytes]]]


class Client(asyncio.Protocol):
    """What comes, write by write: a small one comes as it was written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    connection = connection_of(scope)
    if scope["path"] in ("/waits", "/late"):
        await scope["state"]["waiting"].until_gone(connection, receive, late=scope["path"] == "/late")
        return
    connection.hold()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
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
        """Returns when it has; it is `late` where the client is gone before anybody wants to know."""
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
async def port(waiting: Waiting) -> AsyncIterator[int]:
    """Of a server of `app`."""
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(lambda: Connection(config, state, {"waiting": waiting}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.fixture
async def ask(port: int) -> Ask:
    """Sends a request and returns what comes until the connection is closed."""
    loop = asyncio.get_running_loop()

    async def ask(path: str) -> list[bytes]:
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        transport.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        async with asyncio.timeout(10):
            await client.closed
        return client.pieces

    return ask


async def test_a_held_head_goes_out_with_the_first_of_the_body(ask: Ask) -> None:
    first, *_ = pieces = await ask("/")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"one" in first
    assert b"".join(pieces).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_a_held_head_without_a_body_goes_out_before_the_connection_is_closed(ask: Ask) -> None:
    pieces = await ask("/breaks")
    assert b"".join(pieces).startswith(b"HTTP/1.1 200 OK\r\n")


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
async def test_a_client_that_hangs_up_is_told_of(port: int, waiting: Waiting, sent: bytes, reset: bool) -> None:
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

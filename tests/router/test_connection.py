import asyncio
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
    assert connection is not None
    connection.hold()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    if scope["path"] == "/breaks":
        raise RuntimeError("a bug")
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Sends a request and returns what comes until the connection is closed."""
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def ask(path: str) -> list[bytes]:
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        transport.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        async with asyncio.timeout(10):
            await client.closed
        return client.pieces

    yield ask
    server.close()
    await server.wait_closed()


async def test_a_held_head_goes_out_with_the_first_of_the_body(ask: Ask) -> None:
    first, *_ = pieces = await ask("/")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"one" in first
    assert b"".join(pieces).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_a_held_head_without_a_body_goes_out_before_the_connection_is_closed(ask: Ask) -> None:
    pieces = await ask("/breaks")
    assert b"".join(pieces).startswith(b"HTTP/1.1 200 OK\r\n")

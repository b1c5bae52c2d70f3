"""A server that says byte for byte what a test tells it to, and what the client needs to ask it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import orjson

from bench.client.client import Client
from bench.client.target import Target
from bench.record import Record
from bench.workloads.base import Message

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Script = Callable[[Reader, Writer], Awaitable[None]]

EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ASK = (Message("user", "Say it."),)


@asynccontextmanager
async def serving(script: Script, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Runs `script` on each connection and then closes it. Yields the URL."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()
            running.discard(task)

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http{'s' if tls else ''}://{shown}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def asking(
    url: str, endpoint: Literal["chat", "completions"] = "chat", timeout_s: float = 20.0, **options: Any
) -> AsyncIterator[Client]:
    """Yields a client of the server at `url`, and closes it at the end."""
    target = Target(url, "m", options.pop("api_key", ""), endpoint, 0.0, True, {}, timeout_s)
    client = Client(target, **options)
    try:
        yield client
    finally:
        await client.close()


def new_record() -> Record:
    return Record(session=0, turn=0, input_len=0, output_len=2, due_s=0.0, sent_s=0.0)


async def request(reader: Reader) -> tuple[bytes, bytes]:
    """Reads one request: its head and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head, await reader.readexactly(int(lengths[0])) if lengths else b""


def event(document: Any) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


DONE = b"data: [DONE]\n\n"
HELLO = (delta(content="Hel"), delta(content="lo"), delta("length"), usage(3, 2), DONE)


def chunked(pieces: Sequence[bytes] = HELLO) -> bytes:
    """A complete chunked response."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def always(response: bytes) -> Script:
    """Answers every request with these bytes and keeps the connection."""

    async def script(reader: Reader, writer: Writer) -> None:
        while True:
            await request(reader)
            writer.write(response)

    return script


def once(response: bytes) -> Script:
    """Answers one request with these bytes and closes the connection."""

    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(response)

    return script

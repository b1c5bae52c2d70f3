"""A server that steps like an engine: a step computes some prompt tokens and one token of every decoding request.

Tokens of a prompt are its words.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}


@dataclass(frozen=True)
class Engine:
    """Behaviour of a server.

    Args:
        step_ms: Duration of a step without prompt tokens.
        ms_per_1000: Time that 1,000 prompt tokens add to a step.
        budget: Maximum number of prompt tokens in a step.
        lanes: Prompts are computed beside the steps, which they don't slow down.
        answer: Maximum number of output tokens; overrides the request.
        longest: Longer prompts, in tokens, are refused.
        worn_by: Once a prompt of this many tokens was computed beside decodes, every step takes twice as long.
        keeps_running: Requests go on after their client has gone, and slow other prompts down tenfold.
    """

    step_ms: float = 5.0
    ms_per_1000: float = 20.0
    budget: int = 1_000_000
    lanes: bool = False
    answer: int = 1_000_000
    longest: int = 1_000_000
    worn_by: int = 1_000_000
    keeps_running: bool = False


@dataclass
class _Request:
    prompt: int
    left: int
    output: int
    tokens: asyncio.Queue[None] = field(default_factory=asyncio.Queue)


class _Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step_ms = engine.step_ms
        self._waiting: list[_Request] = []
        self._decoding: list[_Request] = []
        self._work = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, limit=1 << 22)
        stepping = asyncio.create_task(self._steps())
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            stepping.cancel()
            server.close()

    async def _steps(self) -> None:
        engine = self._engine
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            if not self._waiting and not self._decoding:
                await self._work.wait()
            room, finished = engine.budget, []
            for request in self._waiting:
                part = min(room, request.left)
                room -= part
                request.left -= part
                if request.left == 0:
                    finished.append(request)
            self._waiting = [request for request in self._waiting if request.left]
            prefill_ms = (engine.budget - room) * engine.ms_per_1000 / 1000
            if self._decoding and any(request.prompt >= engine.worn_by for request in finished):
                self._step_ms = engine.step_ms * 2
            if engine.lanes:
                for request in finished:
                    loop.call_later(prefill_ms / 1e3, self._begin, request)
                prefill_ms = 0.0
            await asyncio.sleep((self._step_ms + prefill_ms) / 1e3)
            for request in list(self._decoding):
                self._emit(request)
            if not engine.lanes:
                for request in finished:
                    self._begin(request)

    def _begin(self, request: _Request) -> None:
        self._decoding.append(request)
        self._emit(request)
        self._work.set()

    def _emit(self, request: _Request) -> None:
        request.output -= 1
        request.tokens.put_nowait(None)
        if request.output == 0:
            self._decoding.remove(request)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0]) if "content-length:" in head else 0
                body = json.loads(await reader.readexactly(length)) if length else {}
                if head.startswith("get"):
                    _write(writer, 200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
                else:
                    await self._answer(body, reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            return  # the client or the test is over
        finally:
            writer.transport.abort()

    async def _answer(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prompt = len(" ".join(message["content"] for message in body["messages"]).split())
        if prompt > self._engine.longest:
            _write(writer, 400, {"error": {"message": f"at most {self._engine.longest} tokens"}})
            return
        output = min(body["max_tokens"], self._engine.answer)
        request = _Request(prompt, prompt, output)
        if self._engine.keeps_running and self._decoding:
            request.left *= 10
        self._waiting.append(request)
        self._work.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(output):
                await request.tokens.get()
                _event(writer, {**CHUNK, "choices": [{"index": 0, "delta": {"content": "a "}, "finish_reason": None}]})
                await writer.drain()
                if reader.at_eof():
                    raise ConnectionResetError
            usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            _event(writer, {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            _event(writer, {**CHUNK, "choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        finally:
            if not self._engine.keeps_running:
                for queue in (self._waiting, self._decoding):
                    if request in queue:
                        queue.remove(request)


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _write(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def engine_beside(engine: Engine) -> AbstractAsyncContextManager[str]:
    """Runs such a server in the running event loop. Yields its URL."""
    return _Server(engine).serving()


@contextmanager
def engine_server(engine: Engine) -> Iterator[str]:
    """Runs such a server in a thread. Yields its URL."""
    started: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with engine_beside(engine) as url:
            started.put((url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, stop = started.get(timeout=30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

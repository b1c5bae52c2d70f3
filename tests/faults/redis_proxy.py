"""A proxy between processes and Redis, which can be cut off or slowed down."""

import asyncio
import contextlib
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path

SLOW_S = 0.3


class RedisProxy:
    """Forwards connections from one Unix socket to another, on its own thread.

    Attributes:
        flowing: While cleared, no data passes, and connections stay open.
        slow: If true, each read is forwarded SLOW_S seconds late.
    """

    def __init__(self, socket: Path, target: Path) -> None:
        self.flowing = threading.Event()
        self.flowing.set()
        self.slow = False
        self.url = f"unix://{socket}"
        self._socket = socket
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-proxy", daemon=True)

    def start(self) -> None:
        """Returns when the proxy listens."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Ends the proxy and all its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, self._socket))
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # lets the transports close
        self._loop.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled by `stop`
            target_reader, target_writer = await asyncio.open_unix_connection(self._target)
            writers.append(target_writer)
            await asyncio.gather(self._forward(reader, target_writer), self._forward(target_reader, writer))
        for one in writers:
            one.transport.abort()

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.slow:
                await asyncio.sleep(SLOW_S)
            while not self.flowing.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.02)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("the other end is closed")

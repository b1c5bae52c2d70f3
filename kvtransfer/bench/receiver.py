"""The receiver of a measurement: `python -m kvtransfer.bench.receiver HOST PORT`. It ends when the sender disconnects.

The sender gives orders over TCP, a line of JSON each, and gets a line of JSON back when one is done. Anyone who can
reach the port can make it allocate and receive pages: use it in a private network only.
"""

import asyncio
import json
import os
import platform
import socket
import sys
import time
from asyncio import StreamReader, StreamWriter
from contextlib import AsyncExitStack
from typing import Any

from cpd.common.addresses import join_address
from cpd.common.errors import ConfigError, TransferError
from cpd.common.process import switch_threads_often
from kvtransfer import cuda
from kvtransfer.base import Landing, Transport
from kvtransfer.bench import perftest
from kvtransfer.bench.pool import CONTENT, BenchPool
from kvtransfer.factory import create

READY = "listens on"


def machine() -> str:
    """Describes this host."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


class Receiver:
    """Carries out the sender's orders."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._opened = AsyncExitStack()
        self._perftest = AsyncExitStack()
        self._pool: BenchPool
        self._transport: Transport
        self._landing: Landing

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out an order. Raises TransferError if that fails."""
        match order["do"]:
            case "open":
                await self._opened.aclose()
                device = cuda.count() - 1 if order["device"] == "cuda" else None
                self._pool = BenchPool(order["num_pages"], order["page_bytes"], device=device)
                self._opened.callback(self._pool.close)
                self._transport = await create(order["transport"], self._pool.memory, epoch=1, host=self._host)
                self._opened.push_async_callback(self._transport.close)
                return {
                    "transport": self._transport.name,
                    "address": self._transport.address.hex(),
                    "common_address": self._transport.common_address.hex(),
                    "machine": machine(),
                }
            case "expect":
                self._pages = order["pages"]
                self._landing = self._transport.expect(order["reservation"], 1, self._pages)
                self._cpu_s = time.process_time()
                return {}
            case "land":
                await self._landing.done()
                cpu_s = time.process_time() - self._cpu_s
                self._pool.check_and_clear(self._pages, CONTENT)
                return {"cpu_ms": cpu_s * 1e3}
            case "perftest":
                port = _free_port()
                process = await perftest.serve(port, order["tls"])
                self._perftest.push_async_callback(_terminate, process)
                return {"port": port}
            case "end perftest":
                await self._perftest.aclose()
                return {}
        raise TransferError(f"an unknown order: {order}")

    async def close(self) -> None:
        """Ends everything that is open."""
        await self._perftest.aclose()
        await self._opened.aclose()


async def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def serve(host: str, port: int) -> None:
    """Listens until the first sender has disconnected. Raises ConfigError if it can't listen there."""
    finished = asyncio.Event()
    receiver = Receiver(host)

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        server.close()
        try:
            while line := await reader.readline():
                try:
                    reply = {"ok": True} | await receiver.do(json.loads(line))
                except (TransferError, ConfigError) as error:
                    reply = {"ok": False, "error": str(error)}
                writer.write(json.dumps(reply).encode() + b"\n")
        finally:
            await receiver.close()
            writer.close()
            finished.set()

    try:
        server = await asyncio.start_server(answer, host, port, limit=1 << 24)
    except OSError as error:
        raise ConfigError(f"listen: cannot listen on {join_address(host, port)}: {error}") from None
    print(f"{READY} {join_address(host, server.sockets[0].getsockname()[1])}", flush=True)
    await finished.wait()


if __name__ == "__main__":
    switch_threads_often()
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))

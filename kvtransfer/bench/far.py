"""The far end of a measurement: `python -m kvtransfer.bench.far HOST PORT`. It receives, and ends with its caller.

The near end gives orders over TCP, a line of JSON each, and gets a line of JSON back when one is done. Whoever reaches
the port can have it receive pages and take memory for them: for a network of one's own.
"""

import asyncio
import json
import os
import platform
import socket
import sys
import time
from asyncio import StreamReader, StreamWriter
from typing import Any

from cpd.common.errors import ConfigError, TransferError
from cpd.common.process import switch_threads_often
from kvtransfer import cuda
from kvtransfer.base import Landing, Transport
from kvtransfer.bench import perftest
from kvtransfer.bench.pool import FILLING, BenchPool
from kvtransfer.factory import create

READY = "listens on"


def machine() -> str:
    """This host, in words."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


class FarEnd:
    """Does as it is told."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._pool: BenchPool | None = None
        self._landing: Landing
        self._transport: Transport | None = None
        self._perftest: asyncio.subprocess.Process | None = None

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries an order out. Raises TransferError if that fails."""
        match order["do"]:
            case "open":
                await self.close()
                device = cuda.count() - 1 if order["device"] == "cuda" else None
                self._pool = BenchPool(order["num_pages"], order["page_bytes"], device=device)
                self._transport = await create(order["transport"], self._pool.memory, epoch=1, host=self._host)
                return {"address": self._transport.address.hex(), "machine": machine()}
            case "expect" if self._transport is not None:
                self._pages = order["pages"]
                self._landing = self._transport.expect(order["reservation"], 1, self._pages)
                self._cpu_s = time.process_time()
                return {}
            case "land" if self._pool is not None:
                await self._landing.done()
                cpu_s = time.process_time() - self._cpu_s
                self._pool.take(self._pages, FILLING)
                return {"cpu_ms": cpu_s * 1e3}
            case "perftest":
                port = _free_port()
                self._perftest = await perftest.serve(port, order["tls"])
                return {"port": port}
            case "perftest over":
                await self._end_perftest()
                return {}
        raise TransferError(f"an unknown order: {order}")

    async def close(self) -> None:
        """Gives everything up."""
        await self._end_perftest()
        if self._transport is not None:
            await self._transport.close()
            self._transport = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def _end_perftest(self) -> None:
        if self._perftest is not None:
            if self._perftest.returncode is None:
                self._perftest.terminate()
            await self._perftest.wait()
            self._perftest = None


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def serve(host: str, port: int) -> None:
    """Listens until the first caller is through. Raises ConfigError if it can't listen there."""
    through = asyncio.Event()
    far = FarEnd(host)

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        server.close()
        try:
            while line := await reader.readline():
                try:
                    reply = {"ok": True} | await far.do(json.loads(line))
                except (TransferError, ConfigError) as error:
                    reply = {"ok": False, "error": str(error)}
                writer.write(json.dumps(reply).encode() + b"\n")
        finally:
            await far.close()
            writer.close()
            through.set()

    try:
        server = await asyncio.start_server(answer, host, port, limit=1 << 24)
    except OSError as error:
        raise ConfigError(f"listen: cannot listen on {host}:{port}: {error}") from None
    print(f"{READY} {host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await through.wait()


def main() -> None:
    """The command."""
    switch_threads_often()
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()

"""The sender of a measurement: it pushes, and takes the time of each push."""

import asyncio
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.base import Ticket
from kvtransfer.bench import perftest
from kvtransfer.bench.pool import CONTENT, BenchPool, choose
from kvtransfer.bench.receiver import READY, machine
from kvtransfer.bench.result import Cell, Push, TransferResult
from kvtransfer.bench.settings import TransferBenchSettings
from kvtransfer.factory import create

_START_S = 60.0  # detects a hang, not a slow start
_CONNECT_S = 30.0
_SENDER_POOL_BYTES = 1 << 30  # larger than any cache; larger pushes read pages again
_PERFTEST_RUNS = 3  # of ucx_perftest for each kind of push

OnProgress = Callable[[str, float], None]


class _ReceiverClient:
    """A connection to the receiver (`kvtransfer.bench.receiver`). Raises TransferError if an order fails."""

    def __init__(self, host: str, reader: StreamReader, writer: StreamWriter) -> None:
        self.host = host
        self._reader = reader
        self._writer = writer

    async def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.begin(do, **arguments)
        return await self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        self._writer.write(json.dumps({"do": do} | arguments).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise TransferError("the receiver is gone")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise TransferError(f"the receiver: {reply['error']}")
        return reply


@asynccontextmanager
async def _receiver(settings: TransferBenchSettings) -> AsyncIterator[_ReceiverClient]:
    """Connects to the receiver of `--connect`, or starts one."""
    process = None
    where = settings.connect
    if not where:
        command = [sys.executable, "-m", "kvtransfer.bench.receiver", settings.host, "0"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        where = await _listening_at(process)
    host, _, port = where.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=1 << 24)
    except (OSError, ValueError, TimeoutError) as error:
        raise TransferError(f"no receiver at {where!r}: {error}; start one there with --listen") from None
    problem = ""
    try:
        yield _ReceiverClient(host.strip("[]"), reader, writer)
    except TransferError as error:
        problem = str(error)
    finally:
        writer.close()
        code = await process.wait() if process is not None else 0  # it ends when the connection does
    if code:
        raise TransferError(f"the receiver ended with code {code}{problem and f': {problem}'}")
    if problem:
        raise TransferError(problem)


async def _listening_at(process: asyncio.subprocess.Process) -> str:
    """Where a started receiver listens. Raises TransferError if it does not start."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            where = (await process.stdout.readline()).decode().partition(READY)[2].strip()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise TransferError(f"the receiver did not start within {_START_S:g} s") from None
    if not where:
        raise TransferError(f"the receiver ended with code {await process.wait()}")
    return where


async def measure(settings: TransferBenchSettings, on_progress: OnProgress) -> TransferResult:
    """Measures every kind of push.

    Args:
        settings: What to measure.
        on_progress: Called with the name of the present step and the share of all work that is done.

    Raises:
        TransferError: An end can't be set up, or a page was lost.
    """
    layouts = {"scattered": [True], "contiguous": [False], "both": [True, False]}[settings.scatter]
    kinds = [
        (int(size), pages, scattered)
        for size in settings.page_size
        for pages in settings.pages
        for scattered in layouts
    ]
    cells = []
    async with _receiver(settings) as receiver:
        for done, (page_bytes, pages, scattered) in enumerate(kinds):
            bench = _Bench(settings, receiver, page_bytes, pages, scattered)
            on_progress("pushes", done / len(kinds))
            cells.append(await bench.run())
        on_progress("pushes", 1.0)
    return TransferResult(
        schema="cpd-bench-transfer/1",
        transport=bench.transport_name,
        route=bench.route,
        machine=machine() if not settings.connect else f"{machine()}; receiver: {bench.receiver_machine}",
        ceiling=bench.ceiling,
        cells=tuple(cells),
    )


class _Bench:
    """Pushes of one kind."""

    def __init__(
        self, settings: TransferBenchSettings, receiver: _ReceiverClient, page_bytes: int, pages: int, scattered: bool
    ) -> None:
        self._settings = settings
        self._receiver = receiver
        self._page_bytes = page_bytes
        self._pages = pages
        self._scattered = scattered

    async def run(self) -> Cell:
        settings, receiver = self._settings, self._receiver
        their_pages = max(self._pages, settings.pool // self._page_bytes)
        own_pages = min(their_pages, _SENDER_POOL_BYTES // self._page_bytes)
        own_pages = max(1 if self._scattered else self._pages, own_pages)
        opening = {"transport": settings.receiver_transport or settings.transport, "device": settings.device}
        opened = await receiver.order("open", num_pages=their_pages, page_bytes=self._page_bytes, **opening)
        self.receiver_machine = opened["machine"]
        async with AsyncExitStack() as stack:
            pool = BenchPool(own_pages, self._page_bytes, CONTENT, 0 if settings.device == "cuda" else None)
            stack.callback(pool.close)
            transport = await create(
                settings.transport, pool.memory, epoch=2, host=settings.host, same_host=settings.route != "network"
            )
            stack.push_async_callback(transport.close)
            self.transport_name, address = transport.name, opened["address"]
            if opened["transport"] != transport.name:
                self.transport_name, address = f"{transport.name} to {opened['transport']}", opened["common_address"]
            peer = await transport.connect(bytes.fromhex(address))
            self.route = peer.route
            if settings.route == "network" and self.route != "network":
                raise TransferError("--route network: between GPUs of one machine pages go by another route")
            tls = "sm" if peer.route == "memory" else "tcp"
            self.ceiling = self._ceiling(tls)
            pushes, ceilings = [], []
            perftest_at = {round(k * settings.repeats / _PERFTEST_RUNS) for k in range(_PERFTEST_RUNS)}
            for number in range(settings.repeats):
                if number in perftest_at and self.ceiling.startswith("UCX_TLS"):
                    ceilings.append(await self._run_perftest(tls))
                theirs = choose(their_pages, self._pages, scattered=self._scattered)
                if self._scattered:
                    own = [choose(own_pages, 1, scattered=True)[0] for _ in theirs]
                else:
                    own = choose(own_pages, self._pages, scattered=False)
                await receiver.order("expect", reservation=number, pages=theirs)
                receiver.begin("land")
                ticket = Ticket(1, number, 1, tuple(theirs))
                pairs = list(zip(own, range(self._pages), strict=True))
                cpu_s, start = time.process_time(), time.perf_counter()
                await peer.push(ticket, pairs).done()
                taken_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
                landed = await receiver.answer()
                pushes.append(Push(ms=taken_s * 1e3, sender_cpu_ms=cpu_s * 1e3, receiver_cpu_ms=landed["cpu_ms"]))
        return Cell(
            page_bytes=self._page_bytes,
            pages=self._pages,
            scattered=self._scattered,
            pushes=tuple(pushes),
            ceilings=tuple(ceilings),
        )

    def _ceiling(self, tls: str) -> str:
        if not self._settings.perftest:
            return "ucx_perftest was not asked for"
        if self._settings.device == "cuda":
            return "ucx_perftest measures host memory"
        return perftest.command(tls) if perftest.installed() else "ucx_perftest is not installed"

    async def _run_perftest(self, tls: str) -> float:
        started = await self._receiver.order("perftest", tls=tls)
        try:
            return await perftest.put_bandwidth(self._receiver.host, started["port"], tls)
        finally:
            await self._receiver.order("end perftest")

"""`python -m tests.faults.worker ROLE SOCKET FLAGS…`: a worker with points at which faults happen, by order.

Orders come over the Unix socket, one JSON object a line: {"order": point, "action": …, "k": …, "value": …} or
{"release": true}; each is answered with {"reached": […], "used": …}.
"""

import asyncio
import functools
import json
import os
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import typer

import kvtransfer
from cpd.common.config import Role, WorkerSettings
from cpd.common.options import command
from decode_worker.service import DecodeService
from kvtransfer.base import PoolMemory, Transport
from prefill_worker.service import PrefillService
from tests.faults.points import Action, Point, Points
from tests.faults.transport import FaultyTransport
from worker.loading import load_engine
from worker.node import Loaded
from worker.process import on_failed_threads, on_stop_signals, run_process
from worker.worker import Worker


def loader(role: Role, points: Points) -> Callable[[WorkerSettings], Loaded]:
    """Loads the real engine, with a point before its steps."""

    def load(settings: WorkerSettings) -> Loaded:
        loaded = load_engine(settings, role)
        step = loaded.engine.step

        def held_step(now: float = 0.0) -> Any:
            points.passed_by_thread(Point.STEP)
            return step(now)

        loaded.engine.step = held_step  # type: ignore[method-assign]
        return loaded

    return load


def opener(points: Points) -> Callable[..., Any]:
    """Opens the real transport, with its points."""

    async def open_transport(name: str | None, memory: PoolMemory, **arguments: Any) -> Transport:
        return FaultyTransport(await kvtransfer.create(name, memory, **arguments), memory, points)

    return open_transport


async def obey(points: Points, reader: StreamReader, writer: StreamWriter) -> None:
    """Serves one connection of the test's."""
    while line := await reader.readline():
        order = json.loads(line)
        if "order" in order:
            points.order(Point(order["order"]), Action(order["action"]), order["k"], order["value"])
        elif "release" in order:
            points.release()
        writer.write(json.dumps({"reached": list(points.state()), "used": points.used}).encode() + b"\n")
    writer.close()


def run(role: Role, socket: str, settings: WorkerSettings) -> None:
    """Runs the worker."""
    points = Points()

    async def serve() -> int:
        server = await asyncio.start_unix_server(functools.partial(obey, points), socket)
        service = PrefillService if role == "prefill" else DecodeService
        worker = Worker(settings, role, service, load=loader(role, points), open_transport=opener(points))
        on_stop_signals(worker.lifecycle.stop)
        on_failed_threads(worker.lifecycle.stop)
        async with server:
            return await worker.run()

    run_process(settings.worker_id, settings.log_level, serve)


def main() -> None:
    """Runs what `sys.argv` says."""
    role: Any = sys.argv.pop(1)
    socket = sys.argv.pop(1)
    typer.run(command(WorkerSettings, functools.partial(run, role, socket)))


if __name__ == "__main__":
    main()

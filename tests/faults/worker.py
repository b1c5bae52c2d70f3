"""`python -m tests.faults.worker ROLE SOCKET FLAGS…`: a worker with injection points, controlled over a Unix socket.

Commands are JSON objects, one a line: {"arm": point, "action": …, "k": …, "delay_s": …}, {"disarm": true}, or {} to
ask for the state. Each is answered with {"triggered": [point, …], "any_reached": …}.
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
from cpd.common.lifecycle import on_stop_signals
from cpd.common.options import command
from cpd.common.settings import Role, WorkerSettings
from decode_worker.service import DecodeService
from kvtransfer.base import PoolMemory, Transport
from prefill_worker.service import PrefillService
from tests.faults.points import Action, InjectionPoints, Point
from tests.faults.transport import FaultyTransport
from worker.context import LoadedEngine
from worker.engine_loader import expected_memory, load_engine
from worker.process import on_failed_threads, run_process
from worker.worker import Worker


def loader(points: InjectionPoints) -> Callable[[WorkerSettings], LoadedEngine]:
    """Loads the real engine, with injection points before each step and where its memory goes and comes."""

    def between(before: Point, call: Callable[[], None], after: Point) -> Callable[[], None]:
        def called() -> None:
            points.reach_on_thread(before)
            call()
            points.reach_on_thread(after)

        return called

    def load(settings: WorkerSettings) -> LoadedEngine:
        loaded = load_engine(settings)
        step = loaded.engine.step

        def step_with_point(now: float = 0.0) -> Any:
            points.reach_on_thread(Point.STEP)
            return step(now)

        loaded.engine.step = step_with_point  # type: ignore[method-assign]
        if (memory := loaded.model_memory) is not None:
            memory.release = between(Point.RELEASE, memory.release, Point.RELEASED)  # type: ignore[method-assign]
            memory.restore = between(Point.RESTORE, memory.restore, Point.RESTORED)  # type: ignore[method-assign]
        return loaded

    return load


def opener(points: InjectionPoints) -> Callable[..., Any]:
    """Opens the real transport, with injection points."""

    async def open_transport(name: str, memory: PoolMemory, **arguments: Any) -> Transport:
        return FaultyTransport(await kvtransfer.create(name, memory, **arguments), memory, points)

    return open_transport


async def serve_commands(points: InjectionPoints, reader: StreamReader, writer: StreamWriter) -> None:
    """Serves one connection from the test."""
    while line := await reader.readline():
        received = json.loads(line)
        if "arm" in received:
            points.arm(Point(received["arm"]), Action(received["action"]), received["k"], received["delay_s"])
        elif "disarm" in received:
            points.disarm()
        triggered = [point.value for point in Point if points.triggered(point)]
        state = {"triggered": triggered, "any_reached": points.any_reached}
        writer.write(json.dumps(state).encode() + b"\n")
    writer.close()


def run(role: Role, socket: str, settings: WorkerSettings) -> None:
    """Runs the worker."""
    points = InjectionPoints()

    async def serve() -> int:
        server = await asyncio.start_unix_server(functools.partial(serve_commands, points), socket)
        worker = Worker(
            settings,
            role,
            DecodeService,
            PrefillService,
            build_engine=loader(points),
            open_transport=opener(points),
            expect_memory=expected_memory,
        )
        on_stop_signals(worker.lifecycle)
        on_failed_threads(worker.lifecycle.stop)
        async with server:
            return await worker.run()

    run_process(settings.worker_id, settings, serve)


def main() -> None:
    """Parses the command line and runs the worker."""
    role: Any = sys.argv.pop(1)
    socket = sys.argv.pop(1)
    typer.run(command(WorkerSettings, functools.partial(run, role, socket)))


if __name__ == "__main__":
    main()

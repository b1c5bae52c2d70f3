"""One client process: an event loop that sends its share of the load.

It makes workload and arrivals from the plan itself, so that pipes carry little data. The parent's orders (when to
start, and to stop) come over one pipe; reports go over the other.
"""

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import uvloop

from bench.arrivals import plan_arrivals
from bench.client.client import Client
from bench.errors import BenchError
from bench.load.clock import Clock
from bench.load.loop_lag import LoopLag
from bench.load.plan import Plan
from bench.load.sender import Sender
from bench.record import Failure, Record
from bench.workloads.make import make_workload
from cpd.common.errors import CPDError

REPORT_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is prepared. The parent answers with the start time."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests that ended since the last report, and the numbers in flight and still without a token."""

    finished: list[Record]
    in_flight: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last report of a process."""

    lags_s: list[float]
    cpu_share: float
    machine_idle: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The process cannot send its share; the message tells the user why."""

    message: str


def main(plan: Plan, process: int, counter: "Synchronized[int]", orders: Connection, reports: Connection) -> None:
    """Runs client process number `process`. `counter` is the number of the next session to begin."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a stream is an open file
    try:
        uvloop.run(_run(plan, process, counter, orders, reports))
    except CPDError as error:
        reports.send(Failed(str(error)))
    except (BrokenPipeError, EOFError):
        return  # the parent is gone


async def _run(plan: Plan, process: int, counter: "Synchronized[int]", orders: Connection, reports: Connection) -> None:
    loop = asyncio.get_running_loop()
    finished: list[Record] = []
    settings = plan.settings
    workload = make_workload(settings, plan.texts, plan.seed)
    arrivals = plan_arrivals(settings, workload.size, workload.times_s, plan.seed)
    client = Client(plan.target, plan.texts.count)
    with Clock() as clock:
        if process == 0:
            for session in workload.priming():
                await Sender(client, workload, clock, int, _must_succeed).play(session, time.perf_counter())
        await loop.run_in_executor(None, reports.send, Ready())
        start_s = await loop.run_in_executor(None, orders.recv)
        gc.freeze()  # later collections skip the objects made so far
        sender = Sender(client, workload, clock, _session_counter(counter), finished.append)
        sending = asyncio.create_task(sender.send(arrivals, start_s, settings.duration, process, plan.processes))
        loop.add_reader(orders.fileno(), sending.cancel)  # a further order, or the parent's death, means stop
        loop_lag = LoopLag(clock)
        over = False
        while not over:
            await asyncio.wait([sending], timeout=REPORT_INTERVAL_S)
            over = sending.done()
            report = Progress(finished.copy(), sender.in_flight, sender.waiting)
            finished.clear()
            await loop.run_in_executor(None, reports.send, report)
        loop.remove_reader(orders.fileno())
        if not sending.cancelled():
            sending.result()
        reports.send(Done(list(loop_lag.lags_s), loop_lag.cpu_share, loop_lag.machine_idle))
    await client.close()


def _session_counter(counter: "Synchronized[int]") -> Callable[[], int]:
    def take() -> int:
        with counter.get_lock():
            counter.value += 1
            return counter.value - 1

    return take


def _must_succeed(record: Record) -> None:
    if record.error not in ("", Failure.EMPTY):  # a single token may have no text
        raise BenchError(f"filling the server's cache before the run failed: {record.error} {record.detail}")

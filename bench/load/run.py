"""Runs a plan: starts client processes, lets them begin together, and collects their reports."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from bench.errors import BenchError
from bench.load.interrupt import first_interrupt
from bench.load.loop_lag import percentile_ms
from bench.load.plan import Health, LoadReport, Plan
from bench.load.process import Done, Failed, Progress, Ready, main
from bench.record import Record

STREAMS_A_PROCESS = 256  # at 200 chunks a second each, half of what one core can read
START_DELAY_S = 0.05
WATCH_INTERVAL_S = 0.25


Enough = Callable[[float, int, bool], bool]
"""Called with the seconds since the start, the number of requests that wait for their first token, and whether there
was an answer yet. Returns True to end the run."""


def never(elapsed_s: float, waiting: int, answered: bool) -> bool:
    """Never ends the run early."""
    return False


class Watch(Protocol):
    """Gets the progress of a run."""

    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None:
        """Takes the requests that ended since the last call, and the number in flight."""
        ...


def enough_processes(streams: int) -> int:
    """Number of client processes for some concurrent streams."""
    return max(1, min(os.cpu_count() or 1, -(-streams // STREAMS_A_PROCESS)))


@dataclass
class _Child:
    process: SpawnProcess
    orders: Connection
    reports: Connection
    in_flight: int = 0
    waiting: int = 0
    done: Done | None = None


def run_load(plan: Plan, watch: Watch, enough: Enough = never) -> LoadReport:
    """Sends the plan's load and returns when every request has ended.

    Ctrl-C or `enough` end it early and abort the running requests.

    Raises:
        BenchError: A client process failed.
    """
    with _children(plan) as children:
        for child in children:
            _expect_ready(child)
        return _run(children, watch, enough)


def _run(children: Sequence["_Child"], watch: Watch, enough: Enough) -> LoadReport:
    records: list[Record] = []
    with first_interrupt() as interrupted:
        start_s = time.perf_counter() + START_DELAY_S
        for child in children:
            child.orders.send(start_s)
        told = answered = False
        while running := [child for child in children if child.done is None]:
            finished: list[Record] = []
            ready = wait([child.reports for child in running], timeout=WATCH_INTERVAL_S)
            for child in running:
                if child.reports in ready:
                    finished += _read(child)
            elapsed_s = time.perf_counter() - start_s
            in_flight = sum(child.in_flight for child in running)
            waiting = sum(child.waiting for child in running)
            answered = answered or bool(finished) or in_flight > waiting
            if (enough(elapsed_s, waiting, answered) or interrupted) and not told:
                told = True
                for child in running:
                    child.orders.send("stop")
            watch.update(finished, in_flight, elapsed_s)
            records += finished
    records.sort(key=lambda record: record.due_s)
    reports = [child.done for child in children if child.done]
    health = Health(
        processes=len(children),
        cpu_share=max(report.cpu_share for report in reports),
        loop_lag_ms_p50=max(percentile_ms(report.lags_s, 50) for report in reports),
        loop_lag_ms_p99=max(percentile_ms(report.lags_s, 99) for report in reports),
        machine_share=sum(report.cpu_share for report in reports) / (os.cpu_count() or 1),
        machine_idle=min(report.machine_idle for report in reports),
    )
    return LoadReport(records, start_s, health, bool(interrupted))


def _expect_ready(child: _Child) -> None:
    message = _receive(child)
    if isinstance(message, Failed):
        raise BenchError(message.message)
    if not isinstance(message, Ready):
        raise TypeError(f"a client process began with {message!r}")


def _read(child: _Child) -> list[Record]:
    """Takes one report. Returns the requests that ended."""
    match _receive(child):
        case Progress(finished, in_flight, waiting):
            child.in_flight, child.waiting = in_flight, waiting
            return finished
        case Done() as done:
            child.done = done
        case Failed(message):
            raise BenchError(message)
    return []


def _receive(child: _Child) -> object:
    try:
        return child.reports.recv()
    except EOFError:
        child.process.join(1)
        raise BenchError(f"a client process died (exit code {child.process.exitcode}); its output is above") from None


@contextmanager
def _children(plan: Plan) -> Iterator[list[_Child]]:
    """Runs the plan's client processes, and kills those that are left at the end."""
    spawn = multiprocessing.get_context("spawn")
    counter = spawn.Value("q", 0)
    children: list[_Child] = []
    try:
        for number in range(plan.processes):
            their_orders, orders = spawn.Pipe(duplex=False)
            reports, their_reports = spawn.Pipe(duplex=False)
            process = spawn.Process(target=main, args=(plan, number, counter, their_orders, their_reports))
            with _without_interrupts():
                process.start()
                children.append(_Child(process, orders, reports))
            their_orders.close()
            their_reports.close()
        yield children
        for child in children:
            child.process.join()
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.orders.close()
            child.reports.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delays Ctrl-C to the end. Processes started meanwhile never get it: the parent tells them to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

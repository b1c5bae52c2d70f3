"""The plan that client processes get, and their reports."""

from dataclasses import dataclass

from bench.client.target import Target
from bench.record import Record
from bench.settings import RunSettings
from bench.tokens import Texts


@dataclass(frozen=True, slots=True)
class Plan:
    """The description of a run, the same for each client process.

    Args:
        target: The server.
        settings: Workload and arrivals.
        texts: Makes prompts of a given length.
        seed: Seed of prompts and arrivals.
        processes: Number of client processes that share the load.
    """

    target: Target
    settings: RunSettings
    texts: Texts
    seed: int
    processes: int


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the client itself; with several processes, that of the worst one.

    Attributes:
        processes: Number of client processes.
        cpu_share: CPU time over wall time of the busiest process.
        loop_lag_ms_p50: Median time that a ready event waits until the process handles it.
        loop_lag_ms_p99: The same, 99th percentile.
        machine_share: CPU time of all processes over that of all cores of the machine.
        machine_idle: Share of the cores' time that was idle.
    """

    processes: int
    cpu_share: float
    loop_lag_ms_p50: float
    loop_lag_ms_p99: float
    machine_share: float
    machine_idle: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The client processes' report of a run.

    Attributes:
        records: All requests in the order in which they were due.
        start_s: Start of the run, on the clock of the records.
        health: Health of the client.
        interrupted: Ctrl-C ended the run early.
    """

    records: list[Record]
    start_s: float
    health: Health
    interrupted: bool

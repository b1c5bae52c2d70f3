"""What the client processes are told, and what they report."""

from dataclasses import dataclass

from bench.client.target import Target
from bench.record import Record
from bench.settings import RunSettings
from bench.tokens import Texts


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a client process needs to know of a run; the same for each.

    Args:
        target: The server and how it is asked.
        settings: Workload and arrivals.
        texts: Makes prompts of a wanted length.
        seed: Of everything random.
        processes: How many client processes share the load.
    """

    target: Target
    settings: RunSettings
    texts: Texts
    seed: int
    processes: int


@dataclass(frozen=True, slots=True)
class Health:
    """How the client itself fared; of several processes the worst.

    Attributes:
        processes: How many there were.
        cpu_share: CPU time over wall time of the busiest one.
        loop_lag_ms_p50: How long a ready event waits before the process looks at it, median.
        loop_lag_ms_p99: The same, 99th percentile.
        machine_share: CPU time of all of them over that of all cores of the machine.
        machine_idle: Share of that time in which a core had nothing to do.
    """

    processes: int
    cpu_share: float
    loop_lag_ms_p50: float
    loop_lag_ms_p99: float
    machine_share: float
    machine_idle: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run as the client processes saw it.

    Attributes:
        records: Every request, in the order in which they were due.
        start_s: When the run began, on the clock of the records.
        health: How the client fared.
        interrupted: The person ended it early.
    """

    records: list[Record]
    start_s: float
    health: Health
    interrupted: bool

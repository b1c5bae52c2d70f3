"""CPU time that other processes of the machine take: a measurement beside them is none."""

import os
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def other_cpu_s() -> float:
    """CPU time, in seconds since some start, of all processes but this one and its descendants. Linux only."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))  # with ended children
    own = sum(ticks[process] for process in parents if _descends(process, parents))
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + soft - own) / _TICKS_A_SECOND


def _descends(process: int, parents: dict[int, int]) -> bool:
    while process != os.getpid() and process in parents:
        process = parents[process]
    return process == os.getpid()

"""Which CPU cores each worker of a machine computes on.

Workers of one machine get disjoint cores, because two OpenMP teams that share a core wait for each other at every
parallel region.
"""

import os
from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> list[int]:
    """The CPUs this process may run on, those of one package and of one physical core next to each other."""
    return sorted(os.sched_getaffinity(0), key=_place)


def split_cores(cores: Sequence[int], workers: int) -> list[frozenset[int]]:
    """Splits `cores` into `workers` runs of neighbours that differ in length by one at most, longer ones first.

    The sets are disjoint unless there are more workers than cores: then several workers share one.
    """
    if workers > len(cores):
        return [frozenset({cores[index % len(cores)]}) for index in range(workers)]
    size, longer = divmod(len(cores), workers)
    parts, start = [], 0
    for index in range(workers):
        end = start + size + (index < longer)
        parts.append(frozenset(cores[start:end]))
        start = end
    return parts


def _place(cpu: int) -> tuple[int, int, int]:
    """Package and physical core of a CPU, as far as the kernel tells."""
    try:
        package, core = (
            int((_TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        package, core = 0, cpu
    return package, core, cpu

"""Divides a machine's CPU cores among its workers.

The sets are disjoint because two OpenMP teams that share a core wait for each other at every parallel region.
"""

import os
from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> list[int]:
    """Returns the CPUs this process may use, ordered by package and physical core."""
    return sorted(os.sched_getaffinity(0), key=_place)


def split_cores(cores: Sequence[int], workers: int) -> list[frozenset[int]]:
    """Splits `cores` into consecutive runs, one per worker, whose lengths differ by at most one, longer ones first.

    With more workers than cores, several workers share a core.
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
    """Returns package, physical core and number of a CPU."""
    try:
        package, core = (
            int((_TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        package, core = 0, cpu
    return package, core, cpu

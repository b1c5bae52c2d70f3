"""Divides a device among workloads, optimally for given times t_i(units). Pure functions, no device needed.

A device's units (SMs of a GPU, cores of a CPU) are divided into parts. Sizes of parts are multiples of the device's
step, except one that may be the remainder.

    plan_split   finds which workloads run together, and their units, so that all are done soonest
    lane_split   finds the fastest prefill lane that leaves the decode lane within its target
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Self

from cpd.common.errors import CPDError
from cpd.performance.model import PerfModel, Work

Curve = Callable[[float], float]
"""Units -> ms, not necessarily monotonic."""

MAX_WORKLOADS = 10
"""Most workloads of `plan_split`, whose search is exhaustive."""


class NoSplitError(CPDError):
    """No split of the device is within every limit."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device to divide.

    Attributes:
        units: All units, such as the 132 SMs of an H200.
        step: Sizes of parts are multiples of this, except the remainder.
        minimum: Smallest part.
    """

    units: int
    step: int = 1
    minimum: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.step <= self.units and 1 <= self.minimum <= self.units):
            raise ValueError(f"{self.units} units have no parts of {self.step} units, {self.minimum} at least")


@dataclass(frozen=True, slots=True)
class Workload:
    """Pieces of work that run one after the other.

    Attributes:
        name: Unique name.
        count: Number of pieces.
        alone: Time of one piece while nothing else runs.
        together: Time of one piece while other workloads run; None if they do not slow it down.
        limit_ms: Longest time of a piece. A workload with a limit does not wait for others.
    """

    name: str
    count: int
    alone: Curve
    together: Curve | None = None
    limit_ms: float = inf

    def total_ms(self, units: int, *, together: bool) -> float:
        """Returns the time of all pieces; inf if a piece takes longer than the limit."""
        ms = self.together(units) if together and self.together else self.alone(units)
        return self.count * ms if ms <= self.limit_ms else inf


@dataclass(frozen=True, slots=True)
class Stage:
    """Workloads that run together.

    Attributes:
        units: Units of each workload, by name.
        ms: Time until all are done.
    """

    units: dict[str, int]
    ms: float


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Stages that run one after the other.

    Attributes:
        ms: Time of all stages.
        bound_ms: Lower bound of any schedule, even one that changes the split at any moment.
    """

    stages: tuple[Stage, ...]
    ms: float
    bound_ms: float


def plan_split(workloads: Sequence[Workload], device: Device) -> SplitPlan:
    """Finds the stages and parts with the shortest total time. Workloads with a limit all run in the first stage.

    With S = units / step, the grouped knapsack of every set of workloads takes O(2^n S²), and combining the sets takes
    O(3^n).

    Raises:
        NoSplitError: No split is within the limits.
        ValueError: There are no workloads, more than `MAX_WORKLOADS`, or two with one name.
    """
    if not 1 <= len(workloads) <= MAX_WORKLOADS or len({w.name for w in workloads}) < len(workloads):
        raise ValueError(f"a split is planned for 1 to {MAX_WORKLOADS} workloads of different names")
    stages = _stages(workloads, device)
    limited = sum(1 << i for i, workload in enumerate(workloads) if workload.limit_ms < inf)
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # of each set: its time, and the sets of its stages
    for members in range(1, len(stages)):
        best.append(
            min(
                (stages[subset].ms + best[members ^ subset][0], [subset, *best[members ^ subset][1]])
                for subset in _subsets(members)
                if not subset & limited or subset & limited == members & limited
            )
        )
    total_ms, chosen = best[-1]
    if total_ms == inf:
        names = ", ".join(workload.name for workload in workloads if workload.limit_ms < inf)
        raise NoSplitError(f"no split of {device.units} units keeps the limit of {names or 'the minimum part'}")
    chosen.sort(key=lambda subset: not subset & limited)
    return SplitPlan(tuple(stages[subset] for subset in chosen), total_ms, _bound_ms(workloads, device))


def _stages(workloads: Sequence[Workload], device: Device) -> list[Stage]:
    """Finds the best stage of every set of workloads. A set is a number with a bit for each workload.

    `packed[set][k]` has the set's shortest time with k steps in total, and its parts: a grouped knapsack. Then each
    workload of the set is tried with the remainder instead.
    """
    steps = device.units // device.step
    sizes = [k for k in range(1, steps + 1) if k * device.step >= device.minimum]
    packed: list[list[tuple[float, list[int]]]] = [[(0.0, [])] * (steps + 1)]
    stages = [Stage({}, 0.0)]
    for members in range(1, 1 << len(workloads)):
        indices = [i for i in range(len(workloads)) if members >> i & 1]
        last = workloads[indices[-1]]
        others = packed[members ^ 1 << indices[-1]]
        costs = [(k, last.total_ms(k * device.step, together=True)) for k in sizes]
        packed.append(
            [
                min(
                    ((max(others[k - own][0], ms), [*others[k - own][1], own]) for own, ms in costs if own <= k),
                    default=(inf, []),
                )
                for k in range(steps + 1)
            ]
        )
        if len(indices) == 1:
            options = [(last.total_ms(units, together=False), [units]) for units in _part_sizes(device)]
        else:
            ms, parts = packed[members][steps]
            options = [(ms, [part * device.step for part in parts])]
            for place, index in enumerate(indices):
                for k, (ms, parts) in enumerate(packed[members ^ 1 << index]):
                    rest = device.units - k * device.step
                    if ms < inf and rest >= device.minimum:
                        units = [part * device.step for part in parts]
                        ms = max(ms, workloads[index].total_ms(rest, together=True))
                        options.append((ms, [*units[:place], rest, *units[place:]]))
        ms, shares = min(options)
        stages.append(Stage(dict(zip((workloads[i].name for i in indices), shares, strict=ms < inf)), ms))
    return stages


def _part_sizes(device: Device) -> list[int]:
    """Returns all sizes of a part: a number of steps, or the remainder of a number of steps."""
    steps = range(0, device.units + 1, device.step)
    return sorted({size for k in steps for size in (k, device.units - k) if size >= device.minimum})


def _subsets(members: int) -> Iterator[int]:
    """Yields the subsets of a set that contain its first member."""
    first = members & -members
    rest = members ^ first
    subset = rest
    while True:
        yield subset | first
        if not subset:
            return
        subset = (subset - 1) & rest


def _bound_ms(workloads: Sequence[Workload], device: Device) -> float:
    """Returns the larger of two bounds: total units x ms over all units, and the longest workload on its own."""
    area, longest = 0.0, 0.0
    for workload in workloads:
        times = [
            (units, workload.count * min(workload.alone(units), (workload.together or workload.alone)(units)))
            for units in _part_sizes(device)
        ]
        area += min(units * ms for units, ms in times)
        longest = max(longest, min(ms for _, ms in times))
    return max(area / device.units, longest)


@dataclass(frozen=True, slots=True)
class SplitShares:
    """Units of the two lanes, or their shares of the device: the arguments of a `LaneLoad`'s curves."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The load of two lanes that run at the same time.

    Attributes:
        prefill_ms, decode_ms: Time of one step while the other lane runs.
        target_ms: Target for a decode step.
    """

    prefill_ms: Curve
    decode_ms: Curve
    target_ms: float

    @classmethod
    def predicted(cls, model: PerfModel, device: Device, prefill: Work, decode: Work, target_ms: float) -> Self:
        """Makes the load that a performance model predicts."""
        return cls(
            lambda units: model.step_ms(prefill, units / device.units, other_lane=decode),
            lambda units: model.step_ms(decode, units / device.units, other_lane=prefill),
            target_ms,
        )


def lane_splits(device: Device) -> list[SplitShares]:
    """Returns all ways to divide the device in two, smallest decode lane first; none if it is too small."""
    return [
        SplitShares(device.units - decode, decode)
        for decode in _part_sizes(device)
        if device.units - decode >= device.minimum
    ]


def lane_split(load: LaneLoad, splits: Iterable[SplitShares]) -> SplitShares:
    """Returns the split with the fastest prefill within decode's target; if there is none, the fastest decode.

    Raises:
        ValueError: There are no splits.
    """
    return min(splits, key=lambda split: _cost(load, split))


def prepared_splits(loads: Sequence[LaneLoad], splits: Sequence[SplitShares], count: int) -> list[SplitShares]:
    """Finds, by exhaustive search, the `count` splits among which `lane_split` does best for these loads.

    First it minimises the loads that miss their target, then the mean of (time / best time of any split).
    """
    tables = [[_cost(load, split) for split in splits] for load in loads]
    best = [min(table) for table in tables]

    def loss(chosen: Iterable[int]) -> tuple[int, float]:
        costs = [min(table[index] for index in chosen) for table in tables]
        slowdown = sum(cost[1] / least[1] for cost, least in zip(costs, best, strict=True))
        return sum(misses for misses, _, _ in costs), slowdown

    return [splits[index] for index in min(combinations(range(len(splits)), min(count, len(splits))), key=loss)]


def _cost(load: LaneLoad, split: SplitShares) -> tuple[bool, float, float]:
    """Returns whether decode misses its target, then both times, the more important one first."""
    prefill_ms, decode_ms = load.prefill_ms(split.prefill), load.decode_ms(split.decode)
    return (False, prefill_ms, decode_ms) if decode_ms <= load.target_ms else (True, decode_ms, prefill_ms)

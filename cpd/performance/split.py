"""Who gets which part of the device: exact plans over times t_i(s). Pure functions, no device needed.

A device has units (SMs of a GPU, cores of a CPU) that are cut into parts. Parts are multiples of the device's step; one
of them may be the remainder, whatever its size. Two questions are answered:

    plan_split   n workloads of N_i pieces are to be done soonest: which run together, and with how many units each
    lane_split   a prefill and a decode lane go on side by side: the fastest prefill that leaves decode its target
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Self

from cpd.common.errors import CPDError
from cpd.performance.model import PerfModel, Work

Curve = Callable[[float], float]
"""Units -> ms. It need not fall steadily."""

MOST_WORKLOADS = 10
"""Which of them run together is searched through exhaustively."""


class NoSplitError(CPDError):
    """No split of the device keeps every limit."""


@dataclass(frozen=True, slots=True)
class Device:
    """What can be split.

    Attributes:
        units: All of them, such as the 132 SMs of an H200.
        step: Parts are multiples of it, except the remainder.
        minimum: Of any part.
    """

    units: int
    step: int = 1
    minimum: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.step <= self.units and 1 <= self.minimum <= self.units):
            raise ValueError(f"{self.units} units have no parts of {self.step} units, {self.minimum} at least")


@dataclass(frozen=True, slots=True)
class Workload:
    """Pieces of work, one after the other.

    Attributes:
        name: For people.
        count: Pieces.
        alone: Time of one piece with nothing beside it.
        together: The same beside other workloads; None: they don't slow it down.
        limit_ms: No piece may take longer, and none may wait for another workload.
    """

    name: str
    count: int
    alone: Curve
    together: Curve | None = None
    limit_ms: float = inf

    def total_ms(self, units: int, *, together: bool) -> float:
        """Time of all pieces; inf if a piece takes longer than the limit."""
        ms = self.together(units) if together and self.together else self.alone(units)
        return self.count * ms if ms <= self.limit_ms else inf


@dataclass(frozen=True, slots=True)
class Stage:
    """Workloads that run together.

    Attributes:
        units: Of each, by name.
        ms: Until all of them are done.
    """

    units: dict[str, int]
    ms: float


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Stages that run one after the other.

    Attributes:
        ms: Of all stages.
        bound_ms: No schedule of these times is faster, even if it changes the split at any moment.
    """

    stages: tuple[Stage, ...]
    ms: float
    bound_ms: float


def plan_split(workloads: Sequence[Workload], device: Device) -> SplitPlan:
    """The stages and shares of the least total time. Workloads with a limit all run in the first stage.

    With S = units / step, it takes O(2^n S²) steps for the grouped knapsack of every set of workloads (O(n S²) a
    set), and O(3^n) to put the sets together.

    Raises:
        NoSplitError: A limit cannot be kept.
        ValueError: There are none, or more than `MOST_WORKLOADS`, or two of one name.
    """
    if not 1 <= len(workloads) <= MOST_WORKLOADS or len({w.name for w in workloads}) < len(workloads):
        raise ValueError(f"a split is planned for 1 to {MOST_WORKLOADS} workloads of different names")
    stages = _stages(workloads, device)
    limited = sum(1 << i for i, workload in enumerate(workloads) if workload.limit_ms < inf)
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # for each set: its time, and the sets of its stages
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
    """The best stage of every set of workloads; a set is a number with one bit each.

    `packed[set][k]` is the least time in which the set is done in parts of k steps in all, and those parts: the grouped
    knapsack. Then, in turn, each one of the set takes the remainder instead.
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
    """Whatever one part can have: a number of steps, or what a number of steps leaves."""
    steps = range(0, device.units + 1, device.step)
    return sorted({size for k in steps for size in (k, device.units - k) if size >= device.minimum})


def _subsets(members: int) -> Iterator[int]:
    """The subsets of a set that have its first member."""
    first = members & -members
    rest = members ^ first
    subset = rest
    while True:
        yield subset | first
        if not subset:
            return
        subset = (subset - 1) & rest


def _bound_ms(workloads: Sequence[Workload], device: Device) -> float:
    """A piece takes up at least its least units x ms of the device, and a workload's pieces follow each other."""
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
class LaneSplit:
    """Units of the two lanes, or their shares of the device: whatever the curves of a `LaneLoad` take."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What two lanes have to do side by side.

    Attributes:
        prefill_ms, decode_ms: Of one step, beside the other lane.
        target_ms: Longest decode step wanted.
    """

    prefill_ms: Curve
    decode_ms: Curve
    target_ms: float

    @classmethod
    def predicted(cls, model: PerfModel, device: Device, prefill: Work, decode: Work, target_ms: float) -> Self:
        """By the performance model."""
        return cls(
            lambda units: model.step_ms(prefill, units / device.units, beside=decode),
            lambda units: model.step_ms(decode, units / device.units, beside=prefill),
            target_ms,
        )


def lane_splits(device: Device) -> list[LaneSplit]:
    """All ways to cut the device in two, smallest decode lane first. Empty: it is too small."""
    return [
        LaneSplit(device.units - decode, decode)
        for decode in _part_sizes(device)
        if device.units - decode >= device.minimum
    ]


def lane_split(load: LaneLoad, splits: Iterable[LaneSplit]) -> LaneSplit:
    """The fastest prefill among the splits that keep decode's target; the fastest decode where none does.

    Raises:
        ValueError: There are no splits.
    """
    return min(splits, key=lambda split: _cost(load, split))


def prepared_splits(loads: Sequence[LaneLoad], splits: Sequence[LaneSplit], count: int) -> list[LaneSplit]:
    """The few splits among which `lane_split` does best for these loads: an exhaustive search.

    As few as possible miss their target, and then what was to be fast is, as a ratio to the best of all splits and on
    average.
    """
    tables = [[_cost(load, split) for split in splits] for load in loads]
    best = [min(table) for table in tables]

    def loss(chosen: Iterable[int]) -> tuple[int, float]:
        costs = [min(table[index] for index in chosen) for table in tables]
        stretch = sum(cost[1] / least[1] for cost, least in zip(costs, best, strict=True))
        return sum(misses for misses, _, _ in costs), stretch

    return [splits[index] for index in min(combinations(range(len(splits)), min(count, len(splits))), key=loss)]


def _cost(load: LaneLoad, split: LaneSplit) -> tuple[bool, float, float]:
    """Whether decode misses its target, and the times that matter, the more important one first."""
    prefill_ms, decode_ms = load.prefill_ms(split.prefill), load.decode_ms(split.decode)
    return (False, prefill_ms, decode_ms) if decode_ms <= load.target_ms else (True, decode_ms, prefill_ms)

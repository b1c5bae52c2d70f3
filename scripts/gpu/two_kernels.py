"""What do Green Contexts gain for two kinds of work side by side, and does the planner find the best split?

Three pairs: a compute-bound beside a memory-bound kernel, and a prefill's GEMM beside a decode's GEMM and beside its
attention. For every split this measures the time t(SMs) of a piece, alone and beside the other kind, and the time of
100 pieces of each. `cpd.performance.split.plan_split` chooses a split from these curves. Finally 100 pieces of each are
timed on one stream, on two plain streams, on the best split of the sweep and on the planned split, in turns.
"""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cpd.performance.split import Curve, Device, SplitShares, Workload, lane_splits, plan_split
from engine.execution.cuda.driver import CudaDriver, Driver
from engine.execution.cuda.greenctx import GreenContexts, PartitionPair, UnusablePartitionError
from scripts.gpu.common import require_cuda
from scripts.gpu.probes import Probes
from scripts.gpu.results import Report, Target, number, text_table
from scripts.gpu.streams import Launch, Load, alone_ms, beside_ms, new_stream, together_ms
from scripts.gpu.workloads import Gemm, PageReads, compute_for, decode_attention

PIECES = 100
GAIN = Target(at_least=1.34)
"""Published gain for two such kernels on an H200."""
NO_LOSS = Target(at_least=1.0)
PLANNED = Target(at_most=1.03)
ROUNDS = 5
PREFILL_ROWS, DECODE_ROWS, DECODE_MATRICES = 2048, 64, 8
SEQUENCES, CONTEXT = 128, 4096


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kinds of work.

    Attributes:
        first: Launches one piece on the prefill side of a split.
        second: Launches one piece on the decode side.
        every: Measure every n-th split.
        gain: Target for the gain of the best split over one stream.
    """

    name: str
    first: Launch
    second: Launch
    every: int = 3
    gain: Target | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One split: SMs of each part, the time of a piece alone and beside the other kind, and the time of all pieces."""

    first_sms: int
    second_sms: int
    first_alone_ms: float
    second_alone_ms: float
    first_beside_ms: float
    second_beside_ms: float
    all_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's choice.

    Attributes:
        second_sms: SMs of the second kind (the first gets the rest), best choice first, then fallbacks. Empty if both
            kinds should run one after the other on all SMs.
        ms: Predicted time of the best choice.
    """

    second_sms: Sequence[int]
    ms: float


def study(report: Report, driver: Driver, pair: Pair, pieces: int) -> None:
    """Measures one pair, and compares the planned split with the best."""
    stream = new_stream()
    whole = (alone_ms(Load(stream, pair.first)), alone_ms(Load(stream, pair.second)))
    points = sweep(driver, pair, pieces)
    report.add_series(pair.name, [asdict(point) for point in points])
    best = min(points, key=lambda point: point.all_ms)
    with GreenContexts(driver) as contexts:
        planned = plan(points, whole, contexts.units, pieces)
        one_stream = [Load(stream, pair.first), Load(stream, pair.second)]
        as_planned, note = one_stream, "one after the other"
        if planned.second_sms:
            parts = open_first(contexts, planned.second_sms)
            as_planned, note = loads(pair, parts), f"{parts.prefill.sms} + {parts.decode.sms} SMs"
        # Measure again, in turns: the minimum of many measurements is too good, and clocks change.
        times = in_turns(
            {
                "one stream": one_stream,
                "two plain streams": [Load(new_stream(), launch) for launch in (pair.first, pair.second)],
                "best split": loads(pair, contexts.open(best.second_sms)),
                "as planned": as_planned,
            },
            pieces,
        )
    print(_curves(pair, points))
    notes = {
        "best split": f"{best.first_sms} + {best.second_sms} SMs",
        "as planned": f"{note}; predicted {number(planned.ms)} ms",
    }
    for name, ms in times.items():
        report.add(f"{pair.name}: {name}", ms, "ms", note=notes.get(name, f"{pieces} pieces of each"))
    targets = {"one stream": pair.gain, "two plain streams": pair.gain and NO_LOSS, "as planned": PLANNED}
    for name, target in targets.items():
        report.add(f"{pair.name}: {name} / best split", times[name] / times["best split"], "ratio", target=target)


def sweep(driver: Driver, pair: Pair, pieces: int) -> list[Point]:
    """Measures the splits one after the other."""
    with GreenContexts(driver) as contexts:
        sizes = [int(split.decode) for split in lane_splits(contexts.units)]
    points = []
    for size in sizes[:: pair.every]:
        with GreenContexts(driver) as contexts:
            try:
                parts = contexts.open(size)
            except UnusablePartitionError as error:
                print(error, flush=True)
                continue
            points.append(measure_split(pair, parts, pieces))
    return points


def measure_split(pair: Pair, parts: PartitionPair, pieces: int) -> Point:
    """Measures one split."""
    first, second = loads(pair, parts)
    together_ms([first, second], 1)
    return Point(
        parts.prefill.sms,
        parts.decode.sms,
        alone_ms(first),
        alone_ms(second),
        beside_ms(first, second),
        beside_ms(second, first),
        together_ms([first, second], pieces),
    )


def loads(pair: Pair, parts: PartitionPair) -> list[Load]:
    """Each kind of work on its partition."""
    return [Load(parts.prefill.stream(), pair.first), Load(parts.decode.stream(), pair.second)]


def plan(points: Sequence[Point], whole: tuple[float, float], device: Device, pieces: int) -> Plan:
    """The planner's choice for the measured curves.

    Args:
        points: The measured splits.
        whole: Time of a piece of each kind on the whole device, ms.
        device: The device's units.
        pieces: Pieces of each kind.
    """
    first = Workload(
        "first",
        pieces,
        curve({point.first_sms: point.first_alone_ms for point in points} | {device.units: whole[0]}),
        curve({point.first_sms: point.first_beside_ms for point in points}),
    )
    second = Workload(
        "second",
        pieces,
        curve({point.second_sms: point.second_alone_ms for point in points} | {device.units: whole[1]}),
        curve({point.second_sms: point.second_beside_ms for point in points}),
    )
    chosen = plan_split([first, second], device)
    if len(chosen.stages) > 1:
        return Plan((), chosen.ms)
    least = chosen.stages[0].units  # the planner may leave SMs unused; here all are used

    def cost(split: SplitShares) -> tuple[bool, float]:
        total_ms = first.total_ms(int(split.prefill), together=True), second.total_ms(int(split.decode), together=True)
        return split.prefill < least["first"] or split.decode < least["second"], max(total_ms)

    return Plan([int(split.decode) for split in sorted(lane_splits(device), key=cost)], chosen.ms)


def open_first(contexts: GreenContexts, sizes: Sequence[int]) -> PartitionPair:
    """Opens the first of these splits that the device supports.

    Raises:
        UnusablePartitionError: It supports none.
    """
    for size in sizes[:-1]:
        with contextlib.suppress(UnusablePartitionError):
            return contexts.open(size)
    return contexts.open(sizes[-1])


def curve(times: Mapping[int, float]) -> Curve:
    """t(units) through some points: speed is linear between two points, and constant beyond the last."""
    units = sorted(times)
    speeds = [1 / times[count] for count in units]
    return lambda count: 1 / float(np.interp(count, units, speeds))


def in_turns(arrangements: Mapping[str, Sequence[Load]], pieces: int) -> dict[str, float]:
    """Median time of all pieces in each arrangement, ms."""
    rounds = [{name: together_ms(work, pieces) for name, work in arrangements.items()} for _ in range(1 + ROUNDS)]
    return {name: statistics.median(times[name] for times in rounds[1:]) for name in arrangements}


def _curves(pair: Pair, points: Sequence[Point]) -> str:
    rows = [[number(float(value)) for value in asdict(point).values()] for point in points]
    return f"\n{pair.name}\n" + text_table(list(asdict(points[0])), rows) + "\n"


def run(report: Report) -> None:
    """Runs the experiment."""
    device = require_cuda()
    driver = CudaDriver()
    probes = Probes.build(device)
    reads = PageReads(probes, device)
    stream = new_stream()
    compute = compute_for(probes, device, stream, alone_ms(Load(stream, reads)))
    study(report, driver, Pair("compute | memory", compute, reads, every=1, gain=GAIN), PIECES)
    del reads, compute
    prefill = Gemm(device, PREFILL_ROWS)
    decode = Gemm(device, DECODE_ROWS, DECODE_MATRICES)
    study(report, driver, Pair("prefill GEMM | decode GEMM", prefill, decode), PIECES)
    del decode
    kernel, attention = decode_attention(device, SEQUENCES, CONTEXT)
    study(report, driver, Pair(f"prefill GEMM | decode attention ({kernel})", prefill, attention), PIECES)

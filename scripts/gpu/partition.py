"""Into which partitions can the SMs be split, and do streams, CUDA graphs and libraries stay in theirs?

A kernel that records the SM of each of its blocks runs on both streams of a pair at once, and from a graph replayed on
the streams of both partitions and on a plain one. cuBLAS and FlashInfer are checked on a partition against float64,
launched and captured. How much a GEMM on one partition slows down a kernel without memory accesses on the other shows
whether it stays in its partition.
"""

import time
from collections.abc import Sequence

import torch

from cpd.performance.split import lane_splits
from engine.execution.cuda.driver import CudaDriver, CudaError, CudaUnavailableError, Driver, SmResource
from engine.execution.cuda.greenctx import GreenContexts, Partition, PartitionPair, UnusablePartitionError
from engine.execution.cuda.setup import DECODE_SHARES
from scripts.gpu.common import relative_error, require, require_cuda
from scripts.gpu.probes import Probes
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Launch, Load, alone_ms, beside_ms, capture_on, new_stream, together_ms
from scripts.gpu.workloads import Gemm, PagedDecode, compute_for

CYCLES = 200_000
"""Clock cycles that a block stays on its SM: about 0.1 ms, much longer than a launch needs to reach all SMs."""
NONE = Target(at_most=0)
CLOSE = Target(at_most=1e-2)
"""Relative error of bfloat16 against float64."""
UNDISTURBED = Target(at_most=1.1)
PLACED = 6
"""Number of splits for which the placement of work is checked."""
PIECES = 50
PREFILL_ROWS, DECODE_ROWS = 2048, 64
SEQUENCES, CONTEXT = 32, 1000


def granularity(report: Report, driver: Driver) -> list[int]:
    """Reports the possible splits, as described and as made by the driver. Returns the decode partition's sizes."""
    with GreenContexts(driver) as contexts:
        units = contexts.units
        sizes = [int(split.decode) for split in lane_splits(units)]
    report.add("SMs", units.units, "SMs")
    report.add("smallest part", units.minimum, "SMs")
    report.add("parts are multiples of", units.step, "SMs", note="but the remainder")
    whole = driver.sm_resource(0)
    asked = range(1, units.units - units.minimum + 1)
    report.add_series("split", [{"asked": count, "given": given(driver, whole, count)} for count in asked])
    opened, seconds, held = [], [], []
    for size in sizes:
        with GreenContexts(driver) as contexts:
            started = time.perf_counter()
            try:
                parts = contexts.open(size)
            except UnusablePartitionError as error:
                print(error, flush=True)
                continue
            seconds.append(time.perf_counter() - started)
            opened.append(size)
            held += [clusters(driver, part) for part in (parts.prefill, parts.decode)]
    report.add("splits that can be opened", len(opened), "splits", target=Target(at_least=len(sizes)))
    report.add("to open one takes at most", max(seconds) * 1e3, "ms")
    report.add_series("clusters", held)
    fewest, sms = min(((p["clusters_of_8"], p["sms"]) for p in held if "clusters_of_8" in p), default=(None, 0))
    note = "the driver does not tell" if fewest is None else f"on {sms:.0f} SMs"
    report.add("fewest clusters of 8 blocks", fewest, "clusters", note=note)
    return opened


def given(driver: Driver, whole: SmResource, asked: int) -> int:
    """Number of SMs the driver gives when asked for `asked`; 0 if it refuses."""
    try:
        return driver.split(whole, asked)[0].sms
    except CudaError:
        return 0


def clusters(driver: Driver, part: Partition) -> dict[str, float]:
    """Number of thread block clusters that fit on a partition; some SMs may have no neighbour for one."""
    try:
        held = {f"clusters_of_{blocks}": driver.max_clusters(part.handle, blocks) for blocks in (2, 4, 8)}
    except (CudaError, CudaUnavailableError):  # no clusters before compute capability 9.0
        held = {}
    return {"sms": part.sms, **held}


def placement(report: Report, driver: Driver, probes: Probes, device: torch.device, sizes: Sequence[int]) -> None:
    """Checks on which SMs kernels run, launched and replayed."""
    strays = {"launched": 0, "replayed on its own stream": 0, "replayed on the other": 0, "replayed on a plain one": 0}
    unused = 0
    for size in sizes:
        with GreenContexts(driver) as contexts:
            parts = contexts.open(size)
            prefill, decode = sms_of_both(probes, device, parts)
            strays["launched"] += len(prefill & decode)
            unused += max(0, parts.prefill.sms - len(prefill)) + max(0, parts.decode.sms - len(decode))
            out = torch.full((8 * parts.decode.sms,), -1, dtype=torch.int32, device=device)
            own = parts.decode.stream()
            graph = capture_on(own, lambda out=out: probes.record_sms(out, CYCLES))  # type: ignore[misc]
            for name, stream in zip(list(strays)[1:], (own, parts.prefill.stream(), new_stream()), strict=True):
                strays[name] += len(replayed_sms(graph, stream, out) - decode)
            del graph  # before its stream is destroyed
    for name, count in strays.items():
        report.add(f"SMs of the other part: {name}", count, "SMs", target=NONE, note=f"over {len(sizes)} splits")
    report.add("SMs that no block ran on", unused, "SMs", target=NONE, note=f"over {len(sizes)} splits")


def sms_of_both(probes: Probes, device: torch.device, parts: PartitionPair) -> tuple[set[int], set[int]]:
    """The SMs that each partition's kernels use while the other's run."""
    both = (parts.prefill, parts.decode)
    outs = [torch.full((8 * part.sms,), -1, dtype=torch.int32, device=device) for part in both]
    torch.cuda.synchronize()
    for _ in range(3):
        for part, out in zip(both, outs, strict=True):
            with torch.cuda.stream(part.stream()):
                probes.record_sms(out, CYCLES)
    torch.cuda.synchronize()
    prefill, decode = (set(out.tolist()) for out in outs)
    return prefill, decode


def replayed_sms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, out: torch.Tensor) -> set[int]:
    """The SMs that a graph of `record_sms` uses when replayed on a stream."""
    out.fill_(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.replay()
    stream.synchronize()  # synchronising the device does not wait for graphs on a Green Context's stream
    return set(out.tolist())


def library(report: Report, name: str, part: Partition, work: Gemm | PagedDecode) -> None:
    """Checks a library's work on a partition, launched and captured, against float64."""
    torch.cuda.synchronize()
    reference = work.reference()
    stream = part.stream()
    graph = capture_on(stream, work)
    for way, launch in (("launched", work), ("replayed", graph.replay)):
        work.out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            launch()
        stream.synchronize()  # as in `replayed_sms`
        error = relative_error(work.out[: len(reference)], reference)
        report.add(f"{name} on {part.sms} SMs, {way}: error", error, "relative", target=CLOSE)


def speed(report: Report, name: str, part: Partition, work: Launch, sms: int) -> None:
    """Reports a library's speed on a partition over that partition's share of the whole device's speed."""
    whole, on_part = alone_ms(Load(new_stream(), work)), alone_ms(Load(part.stream(), work))
    note = f"{on_part:.4g} ms; {whole:.4g} ms on all {sms}"
    report.add(f"{name} on {part.sms} SMs: speed for its share", whole * sms / (on_part * part.sms), "ratio", note=note)


def isolation(report: Report, parts: PartitionPair, gemm: Gemm, probes: Probes, device: torch.device) -> None:
    """Checks that a kernel without memory accesses is neither slowed nor blocked by a GEMM on the other partition."""
    beside = Load(parts.prefill.stream(), gemm)
    gemm_ms = alone_ms(beside)
    load = Load(parts.decode.stream(), compute_for(probes, device, parts.decode.stream(), gemm_ms))
    compute_ms = alone_ms(load)
    name = f"compute on {parts.decode.sms} SMs, GEMM on {parts.prefill.sms}"
    note = "includes the effect of a lower clock"
    report.add(f"{name}: compute", beside_ms(load, beside) / compute_ms, "x alone", target=UNDISTURBED, note=note)
    both = together_ms([load, beside], PIECES) / (PIECES * max(compute_ms, gemm_ms))
    report.add(
        f"{name}: both to the end",
        both,
        "x slower one",
        target=UNDISTURBED,
        note="2 if one waits for the other: then see what CUDA_DEVICE_MAX_CONNECTIONS=32 does",
    )


def run(report: Report) -> None:
    """Runs the experiment."""
    device = require_cuda()
    driver = CudaDriver()
    sizes = granularity(report, driver)
    probes = Probes.build(device)
    placement(report, driver, probes, device, sizes[:: max(1, len(sizes) // PLACED)])
    prefill, decode = Gemm(device, PREFILL_ROWS), Gemm(device, DECODE_ROWS, 4)
    with GreenContexts(driver) as contexts:
        pairs = contexts.prepare(DECODE_SHARES)  # all at once, as in an engine
        for parts in pairs:
            for name, part, work in (("prefill", parts.prefill, prefill), ("decode", parts.decode, decode)):
                library(report, f"cuBLAS, {name},", part, work)
                speed(report, f"cuBLAS, {name},", part, work, contexts.units.units)
            isolation(report, parts, prefill, probes, device)
        paged = PagedDecode(require("flashinfer", "flashinfer-python"), device, SEQUENCES, CONTEXT)
        for parts in pairs:
            library(report, "FlashInfer, decode,", parts.decode, paged)

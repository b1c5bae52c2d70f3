"""Do Triton kernels that stream weights and pages beat cuBLAS and FlashInfer, and disturb a prefill less?

A decode step reads every weight and its sequences' pages once, for a few rows: it is bound by memory. Two Triton
kernels do the work in several tilings, with three kinds of loads: pipelined by Triton, plain, and plain with the hint
that the bytes will not be read again ("evict first"), which pipelined loads lose. They are compared with the engine's
kernels: cuBLAS for each matrix of Llama 3 8B in bfloat16, FlashInfer for attention over pages. First on the whole
device; then on a part of it beside a prefill's GEMM, which is timed too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.execution.cuda.driver import CudaDriver, Driver
from engine.execution.cuda.greenctx import GreenContexts
from engine.execution.cuda.setup import DECODE_SHARES
from engine.model.config import ModelConfig
from scripts.gpu.common import measure_ms, require, require_cuda
from scripts.gpu.decode_work import Attention, Products, Way, Work, matrices
from scripts.gpu.models import MODELS, kv_bytes, model_config
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Load, alone_ms, beside_ms, capture_on, new_stream
from scripts.gpu.workloads import Gemm

MODEL = "Llama-3-8B"
ROWS = (1, 16, 64)
CONTEXTS = ((1, 8192), (64, 1024))
"""(sequences, tokens of each)"""
ROWS_BESIDE, CONTEXTS_BESIDE, PREFILL_ROWS = 16, (64, 1024), 2048
MAX_ERROR = Target(at_most=1e-2)


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest way to do some work, and the time of one matrix or layer of it."""

    way: Way
    ms: float


def best_of(work: Work, ways: Iterable[Way], stream: torch.cuda.Stream) -> Best | None:
    """The fastest way on a stream; None if none can run."""
    tried: list[Best] = []
    for way in ways:
        try:
            tried.append(Best(way, piece_ms(way, stream) / work.parts))
        except Exception as error:  # Triton raises its own if a tiling needs too much shared memory or registers
            print(f"{work.name}, {way.how}: {type(error).__name__}: {error}", flush=True)
    return min(tried, key=lambda best: best.ms, default=None)


def piece_ms(way: Way, stream: torch.cuda.Stream) -> float:
    """Time of a piece of work replayed as a graph, ms."""
    graph = capture_on(stream, way.launch)
    with torch.cuda.stream(stream):
        return measure_ms(lambda _: graph.replay(), warmup=2, repeats=9).median


def best_of_each(report: Report, work: Work, stream: torch.cuda.Stream) -> Iterator[tuple[str, Best]]:
    """The best of each kind of kernel that runs and gives right results."""
    for kind, ways in work.ways().items():
        best = best_of(work, ways, stream)
        if best is None:
            report.add(f"{work.name}, {kind}", None, "ms", note="none of its tilings can be run")
            continue
        error = work.error(best.way)
        if not MAX_ERROR.met(error):
            report.add(f"{work.name}, {kind}: relative error", error, "", target=MAX_ERROR, note=best.way.how)
            continue
        yield kind, best


def whole_device(report: Report, config: ModelConfig, flashinfer: Any, device: torch.device) -> None:
    """Measures the linear layers of a step, and attention in all layers, with each kind of kernel."""
    stream = new_stream()
    for rows in ROWS:
        totals: dict[str, float] = {}
        floor = 0.0
        for matrix in matrices(config):
            work = Products(matrix, rows, device)
            least = report.ceilings.bytes_ms(matrix.bytes)
            floor += least * matrix.count
            for kind, best in best_of_each(report, work, stream):
                totals[kind] = totals.get(kind, 0.0) + best.ms * matrix.count
                report.add(f"{work.name}, {kind}", best.ms, "ms", floor=least, note=best.way.how)
        for kind, ms in totals.items():
            report.add(f"{MODEL}: linear layers of a step, {rows} rows, {kind}", ms, "ms", floor=floor)
    for sequences, context in CONTEXTS:
        attention = Attention(flashinfer, sequences, context, device)
        floor = report.ceilings.bytes_ms(kv_bytes(config) * sequences * context)
        for kind, best in best_of_each(report, attention, stream):
            name = f"{MODEL}: {attention.name}, {kind}"
            report.add(name, best.ms * config.num_layers, "ms", floor=floor, note=best.way.how)


def beside_a_prefill(report: Report, driver: Driver, works: Sequence[Work], device: torch.device) -> None:
    """Measures a prefill's GEMM on one SM partition beside decode work on the other, for each split."""
    gemm = Gemm(device, PREFILL_ROWS)
    for share in DECODE_SHARES:
        with GreenContexts(driver) as contexts:
            for parts in contexts.prepare([share]):
                where = f"{parts.prefill.sms} + {parts.decode.sms} SMs"
                prefill = Load(parts.prefill.stream(), gemm)
                alone = alone_ms(prefill)
                for work in works:
                    for kind, best in best_of_each(report, work, parts.decode.stream()):
                        slowed = beside_ms(prefill, Load(parts.decode.stream(), best.way.launch))
                        note = f"which alone reads {work.part_bytes / best.ms / 1e6:,.0f} GB/s: {best.way.how}"
                        name = f"{where}: GEMM of {PREFILL_ROWS} rows beside {work.name}, {kind}"
                        report.add(name, slowed / alone, "x alone", note=note)


def run(report: Report) -> None:
    """Runs the experiment."""
    require("triton", "triton")
    flashinfer = require("flashinfer", "flashinfer-python")
    device, config = require_cuda(), model_config(MODELS[MODEL])
    whole_device(report, config, flashinfer, device)
    largest = max(matrices(config)[:-1], key=lambda matrix: matrix.bytes)
    works: list[Work] = [Products(largest, ROWS_BESIDE, device), Attention(flashinfer, *CONTEXTS_BESIDE, device)]
    beside_a_prefill(report, CudaDriver(), works, device)

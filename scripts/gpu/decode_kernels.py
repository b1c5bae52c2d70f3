"""Do kernels that stream what decodes read once beat cuBLAS and FlashInfer, and are they better neighbours?

A decode step reads every weight and its sequences' pages once, for a few rows: it is bound by memory. Two Triton
kernels do that, in several tilings: with loads that Triton pipelines; without; and without but with the hint that
nobody will read the bytes again ("evict first"), which pipelined loads can't carry. They stand beside what the engine
uses: cuBLAS for each matrix of Llama 3 8B in bfloat16, FlashInfer for attention over pages. First on the whole device;
then on a part of it, as decodes run beside a prefill, whose GEMM is timed, too.

Usage: `python -m scripts.gpu.decode_kernels [--out DIR]`
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.execution.cuda.driver import CudaDriver, Driver
from engine.execution.cuda.greenctx import GreenContexts
from engine.execution.cuda.setup import DECODE_SHARES
from engine.model.config import ModelConfig
from scripts.gpu.common import measure_ms, require, require_cuda, run_experiment
from scripts.gpu.decode_work import Attention, Products, Way, Work, matrices
from scripts.gpu.models import MODELS, kv_bytes, model_config
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Load, alone_ms, beside_ms, capture_on, new_stream
from scripts.gpu.workloads import Gemm

QUESTION = "Do kernels that stream what decodes read once beat cuBLAS and FlashInfer, and are they better neighbours?"
MODEL = "Llama-3-8B"
ROWS = (1, 16, 64)
CONTEXTS = ((1, 8192), (64, 1024))
"""Sequences, and tokens of each."""
ROWS_BESIDE, CONTEXTS_BESIDE, PREFILL_ROWS = 16, (64, 1024), 2048
MAX_ERROR = Target(at_most=1e-2)


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest way to do some work, and what a part of it takes."""

    way: Way
    ms: float


def best_of(work: Work, ways: Iterable[Way], stream: torch.cuda.Stream) -> Best | None:
    """The fastest way on a stream; None: none of them can be run."""
    tried: list[Best] = []
    for way in ways:
        try:
            tried.append(Best(way, piece_ms(way, stream) / work.parts))
        except Exception as error:  # Triton's own: a tiling needs more shared memory or registers than there are
            print(f"{work.name}, {way.how}: {type(error).__name__}: {error}", flush=True)
    return min(tried, key=lambda best: best.ms, default=None)


def piece_ms(way: Way, stream: torch.cuda.Stream) -> float:
    """Of a piece of work, replayed as a graph."""
    graph = capture_on(stream, way.launch)
    with torch.cuda.stream(stream):
        return measure_ms(lambda _: graph.replay(), warmup=2, repeats=9).median


def best_of_each(report: Report, work: Work, stream: torch.cuda.Stream) -> Iterator[tuple[str, Best]]:
    """The kinds of kernels that can be run, checked."""
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
    """The linear layers of a step, and attention in all layers, by each kind of kernel."""
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
    """Work of decodes on each of the lanes' decode parts, and a GEMM on the other part."""
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
    """See the module."""
    require("triton", "triton")
    flashinfer = require("flashinfer", "flashinfer-python")
    device, config = require_cuda(), model_config(MODELS[MODEL])
    whole_device(report, config, flashinfer, device)
    largest = max(matrices(config)[:-1], key=lambda matrix: matrix.bytes)
    works: list[Work] = [Products(largest, ROWS_BESIDE, device), Attention(flashinfer, *CONTEXTS_BESIDE, device)]
    beside_a_prefill(report, CudaDriver(), works, device)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("decode_kernels", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())

"""Does a kernel that streams weights beat cuBLAS where decodes multiply few rows, and is it a better neighbour?

A decode step reads every weight once, for a few rows: it is bound by memory. Each matrix of Llama 3 8B in bfloat16, by
cuBLAS, as the engine does it, and by a Triton kernel in several tilings: with loads that Triton pipelines; without; and
without but with the hint that nobody will read the bytes again ("evict first"), which pipelined loads can't carry.
First on the whole device; then on a part of it, as decodes run beside a prefill, whose GEMM is timed, too.

Usage: `python -m scripts.gpu.small_gemm [--out DIR]`
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.cuda.driver import CudaDriver, Driver
from engine.cuda.greenctx import GreenContexts
from engine.cuda.setup import DECODE_SHARES
from scripts.gpu.common import measure_ms, relative_error, require, require_cuda, run_experiment
from scripts.gpu.models import BF16_BYTES, MODELS, model_config
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Load, alone_ms, beside_ms, capture_on, new_stream
from scripts.gpu.workloads import Gemm

QUESTION = "Does a kernel that streams weights beat cuBLAS for few rows, and is it a better neighbour?"
MODEL = "Llama-3-8B"
ROWS = (1, 16, 64)
ROWS_BESIDE, PREFILL_ROWS = 16, 2048
STREAM_BYTES = 1 << 30
"""Copies of a matrix that are multiplied one after the other have so many bytes at least: many times the L2 cache."""
CHECKED_COLUMNS = 256

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""x [rows, inner], weight [width, inner], out [rows, width]: launches out = x @ weight.T"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of the model.

    Attributes:
        count: In a step.
    """

    name: str
    inner: int
    width: int
    count: int

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return self.inner * self.width * BF16_BYTES


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program of the Triton kernel works on, and how. See `small_gemm_kernel`."""

    width: int
    inner: int
    stages: int
    warps: int


PIPELINED = (
    *(Tiling(16, 512, 4, 4), Tiling(32, 256, 5, 4), Tiling(64, 256, 4, 4), Tiling(64, 128, 6, 4)),
    *(Tiling(64, 128, 4, 4), Tiling(128, 64, 5, 4)),  # what has room for 64 rows
)
PLAIN = (Tiling(16, 256, 1, 4), Tiling(16, 512, 1, 4), Tiling(32, 256, 1, 4), Tiling(64, 128, 1, 4))


@dataclass(frozen=True, slots=True)
class Best:
    """Of the ways to multiply that were tried."""

    ms: float
    how: str
    product: Product


class Stream:
    """Products of the same rows with copies of a matrix, one after the other."""

    def __init__(self, matrix: Matrix, rows: int, device: torch.device) -> None:
        copies = math.ceil(STREAM_BYTES / matrix.bytes)
        self.x = torch.randn(rows, matrix.inner, device=device).to(torch.bfloat16)
        self.out = torch.empty(rows, matrix.width, dtype=torch.bfloat16, device=device)
        self.weights = torch.empty(copies, matrix.width, matrix.inner, dtype=torch.bfloat16, device=device)
        self.weights.normal_(std=matrix.inner**-0.5)

    def launch(self, product: Product) -> None:
        """All of them."""
        for weight in self.weights:
            product(self.x, weight, self.out)

    def error(self, product: Product) -> float:
        """Of a product's first and last columns against float64, relative."""
        self.out.fill_(math.nan)
        product(self.x, self.weights[-1], self.out)
        ends = [slice(None, CHECKED_COLUMNS), slice(-CHECKED_COLUMNS, None)]
        return max(relative_error(self.out[:, end], self.x.double() @ self.weights[-1, end].double().T) for end in ends)


def matrices(config: ModelConfig) -> list[Matrix]:
    """The linear layers, fused as the engine fuses them."""
    hidden, layers = config.hidden_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Matrix("qkv", hidden, q + 2 * kv, layers),
        Matrix("o", q, hidden, layers),
        Matrix("gate and up", hidden, 2 * config.intermediate_size, layers),
        Matrix("down", config.intermediate_size, hidden, layers),
        Matrix("head", hidden, config.vocab_size, 1),
    ]


def by_cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `Product`."""
    torch.mm(x, weight.T, out=out)


def by_triton(tiling: Tiling, evict: str) -> Product:
    """See `Product`."""
    from scripts.gpu.small_gemm_kernel import small_gemm

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, inner), width = x.shape, len(weight)
        small_gemm[-(-width // tiling.width),](
            x,
            weight,
            out,
            rows,
            inner,
            width,
            row_block=max(16, 1 << (rows - 1).bit_length()),
            width_block=tiling.width,
            inner_block=tiling.inner,
            evict=evict,
            num_stages=tiling.stages,
            num_warps=tiling.warps,
        )

    return launch


def kernels() -> Mapping[str, list[tuple[str, Product]]]:
    """The kinds of kernels, and of each what to try."""

    def triton(tilings: Sequence[Tiling], evict: str) -> list[tuple[str, Product]]:
        return [(str(tiling), by_triton(tiling, evict)) for tiling in tilings]

    return {
        "cuBLAS": [("cuBLAS", by_cublas)],
        "Triton, pipelined": triton(PIPELINED, ""),
        "Triton, plain": triton(PLAIN, ""),
        "Triton, evict first": triton(PLAIN, "evict_first"),
    }


def best_of(work: Stream, ways: Sequence[tuple[str, Product]], stream: torch.cuda.Stream) -> Best:
    """The fastest way on a stream.

    Raises:
        RuntimeError: None of them can be run.
    """
    tried: list[Best] = []
    for how, product in ways:
        try:
            tried.append(Best(product_ms(work, product, stream), how, product))
        except Exception as error:  # Triton's own: a tiling needs more shared memory or registers than there are
            print(f"{how}: {type(error).__name__}: {error}", flush=True)
    if not tried:
        raise RuntimeError(f"none of these runs: {', '.join(how for how, _ in ways)}")
    return min(tried, key=lambda best: best.ms)


def product_ms(work: Stream, product: Product, stream: torch.cuda.Stream) -> float:
    """Of one matrix, all copies being replayed as a graph."""
    graph = capture_on(stream, lambda: work.launch(product))
    with torch.cuda.stream(stream):
        return measure_ms(lambda _: graph.replay(), warmup=2, repeats=9).median / len(work.weights)


def streams(config: ModelConfig, rows: int, device: torch.device) -> Iterator[tuple[Matrix, Stream]]:
    """Every matrix of the model, one at a time in memory."""
    for matrix in matrices(config):
        yield matrix, Stream(matrix, rows, device)


def whole_device(report: Report, config: ModelConfig, device: torch.device) -> None:
    """The linear layers of a step, by each kind of kernel."""
    stream = new_stream()
    for rows in ROWS:
        totals = dict.fromkeys(kernels(), 0.0)
        floor, worst = 0.0, 0.0
        found: list[dict[str, float | str]] = []
        for matrix, work in streams(config, rows, device):
            least = report.ceilings.bytes_ms(matrix.bytes)
            floor += least * matrix.count
            for kind, ways in kernels().items():
                best = best_of(work, ways, stream)
                worst = max(worst, work.error(best.product))
                totals[kind] += best.ms * matrix.count
                found.append({"matrix": matrix.name, "by": kind, "how": best.how, "ms": best.ms, "floor_ms": least})
        report.add_series(f"{rows} rows", found)
        report.add(f"{rows} rows: largest relative error", worst, "", target=Target(at_most=1e-2))
        for kind, ms in totals.items():
            report.add(f"{MODEL}: linear layers of a step, {rows} rows, {kind}", ms, "ms", floor=floor)


def beside_a_prefill(report: Report, driver: Driver, config: ModelConfig, device: torch.device) -> None:
    """The largest matrix of a layer on each of the lanes' decode parts, and a GEMM on the other part."""
    matrix = next(matrix for matrix in matrices(config) if matrix.name == "gate and up")
    work, gemm = Stream(matrix, ROWS_BESIDE, device), Gemm(device, PREFILL_ROWS)
    for share in DECODE_SHARES:
        with GreenContexts(driver) as contexts:
            for parts in contexts.prepare([share]):
                where = f"{parts.prefill.sms} + {parts.decode.sms} SMs"
                prefill = Load(parts.prefill.stream(), gemm)
                alone = alone_ms(prefill)
                for kind, ways in kernels().items():
                    best = best_of(work, ways, parts.decode.stream())
                    decodes = Load(parts.decode.stream(), lambda best=best: work.launch(best.product))  # type: ignore[misc]
                    slowed = beside_ms(prefill, decodes)
                    note = f"weights alone at {matrix.bytes / best.ms / 1e6:,.0f} GB/s: {best.how}"
                    name = f"{where}: GEMM of {PREFILL_ROWS} rows beside {kind}"
                    report.add(name, slowed / alone, "x alone", note=note)


def run(report: Report) -> None:
    """See the module."""
    require("triton", "triton")
    device, config = require_cuda(), model_config(MODELS[MODEL])
    whole_device(report, config, device)
    beside_a_prefill(report, CudaDriver(), config, device)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("small_gemm", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())

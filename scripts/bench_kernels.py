"""Measures the CPU kernels against the torch fallback in one run: whole steps of two models, and single operations.

Usage: `python -m scripts.bench_kernels [--threads N] [--repeat N]`, from the repository's root.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.model.config import RopeConfig
from engine.model.decoder import LayerByLayer
from engine.model.rope import rope_table
from engine.ops.base import DeviceBatch, FusedStack, Layer, Linear, Ops, Stack
from engine.ops.cpu_ops import CpuOps
from engine.ops.quantized import quantize
from engine.ops.torch_ops import TorchOps
from tests.engine.steps import step_of

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
VOCAB = 4096


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int


@dataclass(frozen=True)
class Case:
    """A step; `lens` has the query and context tokens of each sequence."""

    name: str
    lens: Sequence[tuple[int, int]]


SMALL = Shape("4 layers, hidden 256", 4, 256, 4, 2, 64, 1024)
LARGE = Shape("28 layers, hidden 1024", 28, 1024, 16, 8, 128, 3072)
STEPS = {
    SMALL: [
        Case("decode 1, context 600", [(1, 600)]),
        Case("decode 16, context 600", [(1, 600)] * 16),
        Case("prefill 512", [(512, 512)]),
        Case("prefill 512 beside decode 15", [*[(1, 600)] * 15, (512, 512)]),
    ],
    LARGE: [
        Case("decode 1, context 300", [(1, 300)]),
        Case("decode 8, context 300", [(1, 300)] * 8),
        Case("prefill 512", [(512, 512)]),
    ],
}
CONTEXTS = [
    Case("decode 16, context 600", [(1, 600)] * 16),
    Case("decode 7 of 100 and 1 of 8,000", [*[(1, 100)] * 7, (1, 8000)]),
    Case("prefill 512", [(512, 512)]),
    Case("chunk 512 after 1,536", [(512, 2048)]),
]


def make_batch(case: Case, num_pages: int) -> tuple[DeviceBatch, torch.Tensor | None]:
    """A step over scattered pages, and the rows that sample; None if all do."""
    free = iter(np.random.default_rng(0).permutation(num_pages).tolist())
    batch = step_of(case.lens, [[next(free) for _ in range(blocks_for(context))] for _, context in case.lens])
    every = batch.num_tokens == batch.num_seqs
    return batch, None if every else batch.query_start[1:] - 1


def make_stack(ops: Ops, shape: Shape, bits: int | None = None, dtype: torch.dtype = DTYPE) -> Stack:
    """A decoder with random weights.

    Args:
        bits: Bits of quantised weights; None for plain ones.
    """

    def linear(n: int, k: int) -> Linear:
        weight = (torch.randn(n, k) / k**0.5).to(dtype)
        return ops.pack(weight if bits is None else quantize(weight, bits), None)

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=dtype)

    hidden, head_width = shape.hidden, shape.heads * shape.dim
    layers = [
        Layer(
            input_norm=ones(hidden),
            qkv=linear(head_width + 2 * shape.kv_heads * shape.dim, hidden),
            q_norm=ones(shape.dim),
            k_norm=ones(shape.dim),
            o=linear(hidden, head_width),
            post_norm=ones(hidden),
            gate_up=linear(2 * shape.width, hidden),
            down=linear(hidden, shape.width),
        )
        for _ in range(shape.layers)
    ]
    table = rope_table(RopeConfig(), shape.dim, 8192, CPU)
    return Stack(layers, ones(hidden), linear(VOCAB, hidden), table, 1e-6, shape.dim**-0.5)


def measure(run: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each run after a warm-up; runs for two seconds, and at least `repeat` times."""
    times: list[float] = []
    run()
    while len(times) < repeat or (sum(times) < 2 and len(times) < 50 * repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def report(name: str, fallback: Callable[[], object], kernels: Callable[[], object], repeat: int) -> None:
    """Prints one line of the table. Runs alternate, so that other load affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        for run, results in zip((fallback, kernels), times, strict=True):
            results += measure(run, repeat)
    slow, fast = (1e3 * statistics.median(results) for results in times)
    best = 1e3 * min(times[1])
    print(f"| {name} | {show(slow)} | {show(fast)} | {show(best)} | {slow / fast:.1f} |", flush=True)


def show(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def head(title: str) -> None:
    print(f"\n| {title} | torch, ms | kernels, ms | best, ms | ratio |\n| --- | --- | --- | --- | --- |")


@torch.inference_mode()
def bench_steps(shape: Shape, repeat: int) -> None:
    back_ends: tuple[Ops, Ops] = (TorchOps(), CpuOps())
    stacks = [make_stack(ops, shape) for ops in back_ends]
    runs = [ops.fuse(stack) or LayerByLayer(ops, stack) for ops, stack in zip(back_ends, stacks, strict=True)]
    num_pages = max(sum(blocks_for(context) for _, context in case.lens) for case in STEPS[shape]) + 1
    pool = torch.randn(num_pages, shape.layers, 2, shape.kv_heads, BLOCK_SIZE, shape.dim, dtype=DTYPE)
    kv = [pool[:, layer] for layer in range(shape.layers)]
    head(shape.name)
    for case in STEPS[shape]:
        batch, rows = make_batch(case, num_pages)
        x = torch.randn(batch.num_tokens, shape.hidden).to(DTYPE)
        for ops in back_ends:
            ops.prepare(batch)
        fallback, kernels = (partial(_step, run, x, batch, kv, rows) for run in runs)
        report(case.name, fallback, kernels, repeat)


def _step(
    run: FusedStack, x: torch.Tensor, batch: DeviceBatch, kv: list[torch.Tensor], rows: torch.Tensor | None
) -> None:
    run(x.clone(), batch, kv, rows)


@torch.inference_mode()
def bench_operations(shape: Shape, repeat: int) -> None:
    torch_ops, cpu_ops = TorchOps(), CpuOps()
    head(f"{shape.name}: one operation")
    for name, n, k in (
        ("qkv", (shape.heads + 2 * shape.kv_heads) * shape.dim, shape.hidden),
        ("gate and up", 2 * shape.width, shape.hidden),
        ("down", shape.hidden, shape.width),
    ):
        weight = (torch.randn(n, k) / k**0.5).to(DTYPE)
        fallback, kernel = torch_ops.pack(weight, None), cpu_ops.pack(weight, None)
        for rows in (1, 16, 512):
            x = torch.randn(rows, k).to(DTYPE)
            report(f"{name}, {rows} rows", partial(fallback, x), partial(kernel, x), repeat)
    for case in CONTEXTS:
        num_pages = sum(blocks_for(context) for _, context in case.lens) + 1
        pool = torch.randn(num_pages, 2, 2, shape.kv_heads, BLOCK_SIZE, shape.dim, dtype=DTYPE)
        batch, _ = make_batch(case, num_pages)
        q, kv = torch.randn(batch.num_tokens, shape.heads, shape.dim).to(DTYPE), pool[:, 1]
        torch_ops.prepare(batch)
        report(
            f"attention, {case.name}",
            partial(torch_ops.attention, q, kv, batch, 0.1),
            partial(cpu_ops.attention, q, kv, batch, 0.1),
            repeat,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"bf16, {options.threads} threads, torch {torch.__version__}; median of the runs, and the kernels' best")
    for shape in STEPS:
        bench_steps(shape, options.repeat)
        bench_operations(shape, options.repeat)


if __name__ == "__main__":
    main()

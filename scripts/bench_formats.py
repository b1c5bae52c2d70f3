"""Measures the CPU kernels with weights in bf16, int8 and int4, beside a plain read of memory in the same run.

Usage: `python -m scripts.bench_formats [--threads N] [--seconds S]`, from the repository's root.

The model has the layers of one of 0.46 billion parameters and random weights. Steps of all formats alternate. A decode
reads all weights once, so that bytes of weights a second show how far it is from the memory's speed. The error is that
of the logits of one prompt and a small model, relative to those of the same weights in float32.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import statistics
import time
from collections.abc import Callable

import torch

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.ops.base import FusedStack, Stack
from engine.ops.cpu_ops import CpuOps, PackedLinear
from scripts.bench_kernels import DTYPE, LARGE, SMALL, Case, make_batch, make_stack

FORMATS = {"bf16": None, "int8": 8, "int4": 4}
CASES = [
    Case("decode 1, context 300", [(1, 300)]),
    Case("decode 8, context 300", [(1, 300)] * 8),
    Case("decode 16, context 300", [(1, 300)] * 16),
    Case("prefill 512", [(512, 512)]),
]
READ_BYTES = 1 << 30


def weight_bytes(stack: Stack) -> int:
    """Bytes of the packed weights."""
    linears = [
        stack.head,
        *(each for layer in stack.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)),
    ]
    return sum(linear.weight.nbytes for linear in linears if isinstance(linear, PackedLinear))


def seconds_of(run: Callable[[], object]) -> float:
    """Runs once."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def step_of(run: FusedStack, case: Case, kv: list[torch.Tensor], num_pages: int) -> Callable[[], object]:
    """Makes a function that runs one step."""
    batch, rows = make_batch(case, num_pages)
    x = torch.randn(batch.num_tokens, LARGE.hidden).to(DTYPE)
    return lambda: run(x.clone(), batch, kv, rows)


@torch.inference_mode()
def bench(seconds: float) -> None:
    """Prints a table with a line for each case and format."""
    ops = CpuOps()
    stacks = {}
    for name, bits in FORMATS.items():
        torch.manual_seed(0)
        stacks[name] = make_stack(ops, LARGE, bits)
    runs = {name: ops.fuse(stack) for name, stack in stacks.items()}
    num_pages = max(sum(blocks_for(context) for _, context in case.lens) for case in CASES) + 1
    pool = torch.randn(num_pages, LARGE.layers, 2, LARGE.kv_heads, BLOCK_SIZE, LARGE.dim, dtype=DTYPE)
    kv = [pool[:, layer] for layer in range(LARGE.layers)]
    memory = torch.ones(READ_BYTES // 4)
    print("| step | format | tokens/s | over bf16 | weights, GB/s | of a plain read |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        steps = {name: step_of(run, case, kv, num_pages) for name, run in runs.items() if run is not None}
        steps["read"] = memory.sum
        times: dict[str, list[float]] = {name: [] for name in steps}
        while sum(map(sum, times.values())) < seconds or len(times["read"]) < 5:
            for name, step in steps.items():
                times[name].append(seconds_of(step))
        medians = {name: statistics.median(each) for name, each in times.items()}
        read = READ_BYTES / medians.pop("read")
        for name, median in medians.items():
            tokens = sum(queries for queries, _ in case.lens)
            rate = weight_bytes(stacks[name]) / median
            shares = f"{rate / 1e9:.1f} | {rate / read:.0%}" if tokens == len(case.lens) else "| "
            print(
                f"| {case.name} | {name} | {tokens / median:.1f} | {medians['bf16'] / median:.2f} | {shares} |",
                flush=True,
            )
    print(f"\nA plain read: {read / 1e9:.1f} GB/s in the last case.")


@torch.inference_mode()
def show_errors() -> None:
    """Prints the error of each format's logits: root mean square, relative to that of the logits in float32."""
    ops, case, shape = CpuOps(), Case("prefill 64", [(64, 64)]), SMALL
    results = {}
    for name, bits, dtype in (
        ("float32", None, torch.float32),
        *((name, bits, DTYPE) for name, bits in FORMATS.items()),
    ):
        torch.manual_seed(0)
        stack = make_stack(ops, shape, bits, dtype)
        run = ops.fuse(stack)
        assert run is not None
        batch, _ = make_batch(case, 8)
        pool = torch.zeros(8, shape.layers, 2, shape.kv_heads, BLOCK_SIZE, shape.dim, dtype=dtype)
        x = torch.randn(64, shape.hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
        logits = run(x, batch, [pool[:, layer] for layer in range(shape.layers)], None)
        assert logits is not None
        results[name] = logits.float()
    expected = results.pop("float32")
    print("\n| format | error of the logits |\n| --- | --- |")
    for name, logits in results.items():
        print(f"| {name} | {(logits - expected).norm() / expected.norm():.4f} |")


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, torch {torch.__version__}; medians of alternating steps")
    bench(options.seconds)
    show_errors()


if __name__ == "__main__":
    main()

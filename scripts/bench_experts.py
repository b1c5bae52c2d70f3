"""Measures a mixture of experts beside a dense model with the same active parameters, on the CPU kernels.

Usage: `python -m scripts.bench_experts [--threads N] [--seconds S]`, from the repository's root.

Both have the attention and the width of a model of 0.46 billion parameters: the dense one an MLP of 3,072, the other
one 32 experts of 384, of which each token takes 8. Steps of the two alternate, and each has new random tokens, so that
the router chooses other experts. One decode reads the same bytes in both. Several decodes read more experts, the more
their tokens differ; random ones differ most.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import statistics
import time
from dataclasses import replace

import torch

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.ops.base import FusedStack, Routing, Stack
from engine.ops.cpu_ops import CpuOps
from scripts.bench_kernels import DTYPE, LARGE, Case, make_batch, make_stack

COUNT, PER_TOKEN = 32, 8
CASES = [
    Case("decode 1, context 300", [(1, 300)]),
    Case("decode 8, context 300", [(1, 300)] * 8),
    Case("prefill 512", [(512, 512)]),
]


def with_experts(ops: CpuOps, stack: Stack) -> Stack:
    """Replaces the MLPs of a stack by experts with as many active parameters."""
    hidden, width = LARGE.hidden, LARGE.width // PER_TOKEN

    def weight(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k).div(k**0.5).to(DTYPE)

    layers = [
        replace(
            layer,
            gate_up=None,
            down=None,
            router=ops.pack(weight(COUNT, hidden), None),
            experts=ops.pack_experts(
                ((weight(2 * width, hidden), weight(hidden, width)) for _ in range(COUNT)),
                COUNT,
                Routing(PER_TOKEN, normalize=True),
            ),
        )
        for layer in stack.layers
    ]
    return replace(stack, layers=layers, expert_bytes=stack.expert_bytes.copy())


def run_step(run: FusedStack, case: Case, kv: list[torch.Tensor], num_pages: int) -> float:
    """Runs a step over new random tokens. Returns its time in seconds."""
    batch, rows = make_batch(case, num_pages)
    x = torch.randn(batch.num_tokens, LARGE.hidden).to(DTYPE)
    start = time.perf_counter()
    run(x, batch, kv, rows)
    return time.perf_counter() - start


@torch.inference_mode()
def bench(seconds: float) -> None:
    """Prints a table with a line for each case."""
    ops = CpuOps()
    dense = make_stack(ops, LARGE)
    mixture = with_experts(ops, dense)
    runs = [ops.fuse(stack) for stack in (dense, mixture)]
    num_pages = max(sum(blocks_for(context) for _, context in case.lens) for case in CASES) + 1
    pool = torch.randn(num_pages, LARGE.layers, 2, LARGE.kv_heads, BLOCK_SIZE, LARGE.dim, dtype=DTYPE)
    kv = [pool[:, layer] for layer in range(LARGE.layers)]
    print("| step | dense, tokens/s | experts, tokens/s | ratio (fastest steps) | experts read, MB a step |")
    print("| --- | --- | --- | --- | --- |")
    for case in CASES:
        times: tuple[list[float], list[float]] = ([], [])
        steps, before = 0, int(mixture.expert_bytes[0])
        while sum(map(sum, times)) < seconds or steps < 5:
            for run, results in zip(runs, times, strict=True):
                assert run is not None
                results.append(run_step(run, case, kv, num_pages))
            steps += 1
        tokens = sum(queries for queries, _ in case.lens)
        speeds = [tokens / statistics.median(results) for results in times]
        best = min(times[0]) / min(times[1])
        read = (int(mixture.expert_bytes[0]) - before) / steps / 1e6
        ratio = f"{speeds[1] / speeds[0]:.2f} ({best:.2f})"
        print(f"| {case.name} | {speeds[0]:.1f} | {speeds[1]:.1f} | {ratio} | {read:.0f} |", flush=True)


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"bf16, {options.threads} threads, torch {torch.__version__}; medians of alternating steps")
    bench(options.seconds)


if __name__ == "__main__":
    main()

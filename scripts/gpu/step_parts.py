"""Kernel times of a step from torch's profiler, beside the floor of each kind of kernel."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from engine.execution.runner import TorchRunner
from scripts.gpu.models import Lens, attention_flop, kv_bytes, step_bytes, step_flop
from scripts.gpu.random_model import random_step
from scripts.gpu.results import Report

STEPS = 5

KINDS: Mapping[str, str] = {
    "attention": r"flashinfer|scaled_dot_product",
    "norms": r"rms_norm",
    "RoPE and store": r"rope_store",
    "activation": r"silu",
    "matrix products": r"gemm|gemv|nvjet|cutlass|splitk|cublas|linear|::mm|::addmm",
}
"""Patterns in the lower-case kernel names of each kind. The first match counts, because FlashInfer uses CUTLASS."""
REST = "copies, sampling and the rest"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of all launches of one kernel in a step, and their number."""

    name: str
    count: float
    ms: float

    @property
    def kind(self) -> str:
        """See `KINDS`."""
        return next((kind for kind, names in KINDS.items() if re.search(names, self.name.lower())), REST)


def kernel_times(run: Callable[[], object], device: torch.device, steps: int = STEPS) -> list[KernelTime]:
    """Kernels that run on a device during a step, the longest first. On a CPU, torch's operations count as kernels.

    Args:
        run: Runs a step to its end.
        device: The device.
        steps: Steps to average over.
    """
    run()
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        for _ in range(steps):
            run()
    times = [
        KernelTime(
            event.key,
            event.count / steps,
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / steps / 1e3,
        )
        for event in profiler.key_averages()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU")
    ]
    return sorted(times, key=lambda time: -time.ms)


def report_parts(report: Report, runner: TorchRunner, name: str, lens: Lens, step_ms: float) -> None:
    """Reports the time of each kind of kernel in a step, and the time without a kernel.

    Call it last in an experiment: the profiler may slow down later steps.

    Args:
        report: Takes the figures.
        runner: The runner.
        name: Name of the step.
        lens: Lengths of its sequences.
        step_ms: Time of the step without the profiler.
    """
    batch = random_step(runner, lens)

    def run() -> None:
        runner.full.launch(batch)
        runner.full.collect()

    times = kernel_times(run, runner.pool.device)
    if not times:
        report.add(f"{name}: kernels", None, "ms", note="the profiler saw none")
        return
    config, ceilings = runner.config, report.ceilings
    kv = kv_bytes(config) * sum(context for _, context in lens)
    pairs = attention_flop(config, lens)
    floors = {
        "attention": max(ceilings.bytes_ms(kv), ceilings.flop_ms(pairs)),
        "matrix products": max(
            ceilings.bytes_ms(step_bytes(config, lens) - kv), ceilings.flop_ms(step_flop(config, lens) - pairs)
        ),
    }
    for kind in (*KINDS, REST):
        kernels = [time for time in times if time.kind == kind]
        if kernels:
            ms, longest = sum(time.ms for time in kernels), kernels[0]
            note = f"{sum(time.count for time in kernels):g} launches; most of it {longest.name[:80]}"
            report.add(f"{name}: {kind}", ms, "ms", floor=floors.get(kind), note=note)
    report.add(f"{name}: no kernel", step_ms - sum(time.ms for time in times), "ms", note="negative: some overlap")
    report.add_series(
        f"{name}: kernels", [{"kernel": time.name, "launches": time.count, "ms": time.ms} for time in times]
    )

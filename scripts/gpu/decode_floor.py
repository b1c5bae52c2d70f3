"""How close are decode steps of a Llama-3-8B shape to the bandwidth floor, and what do CUDA graphs save?

The model has random bfloat16 weights, samples greedily and runs in the engine's runner. A step is timed from its launch
until its tokens are on the host, and with overlap: launched before the tokens of the step before are read. The floor is
the time to read weights, keys and values once at the measured copy bandwidth. Eager steps run without graphs. Finally
torch's profiler shows which kernels take the time.
"""

import gc
from collections.abc import Callable, Mapping

import torch

from engine.batch import Batch
from engine.execution.executor import Lane
from engine.execution.runner import TorchRunner
from scripts.engine_driver import as_in_a_worker
from scripts.gpu.common import require
from scripts.gpu.models import MODELS, Lens, model_config, step_bytes
from scripts.gpu.random_model import StepTime, ahead_ms, random_runner, random_step, step_ms
from scripts.gpu.results import Report, Target
from scripts.gpu.step_parts import report_parts

MODEL = "Llama-3-8B"
CONTEXT = 1024
BATCHES = (1, 64, 128)
OUTLIER: Lens = [(1, 256)] * 127 + [(1, 8192)]
UNIFORM: Lens = [(1, 318)] * 128
"""Has as many tokens as `OUTLIER`."""
MIN_SHARE = Target(at_least=0.8)
MIN_GAIN = Target(at_least=3.4)
"""Published for another engine at batch 1: 23.9 to 7.0 ms."""
MAX_OUTLIER = Target(at_most=1.15)


def measure(
    report: Report, runner: TorchRunner, name: str, lens: Lens, how: Callable[[Lane, Batch], StepTime]
) -> float:
    """Times a decode step and reports it. Returns the median, ms."""
    times = how(runner.full, random_step(runner, lens))
    floor = report.ceilings.bytes_ms(step_bytes(runner.config, lens))
    report.add(name, times.whole.median, "ms", floor=floor, note=times.note)
    return times.whole.median


def measure_all(report: Report, fields: Mapping[str, object], device: str = "cuda") -> None:
    """Measures all figures of a model with these config.json fields."""
    config = model_config(fields)
    tokens = max(BATCHES) * CONTEXT
    eager_ms, graph_ms = {}, {}
    for graphs in (0, max(BATCHES)):
        runner = random_runner(fields, tokens=tokens, graph_decodes=graphs, device=device)
        kind = "graph" if graphs else "eager"
        for count in BATCHES:
            lens = [(1, CONTEXT)] * count
            name = f"{MODEL}: decode {count} x {CONTEXT:,}"
            median = measure(report, runner, f"{name}, {kind}", lens, step_ms)
            if not graphs:
                eager_ms[count] = median
                continue
            graph_ms[count] = median
            floor = report.ceilings.bytes_ms(step_bytes(config, lens))
            report.add(f"{name}: share of the floor", floor / median, "ratio", target=MIN_SHARE)
            if runner.full.overlaps:
                ahead = measure(report, runner, f"{name}, {kind}, launched ahead", lens, ahead_ms)
                report.add(f"{name}, launched ahead: share of the floor", floor / ahead, "ratio", target=MIN_SHARE)
            target = MIN_GAIN if count == 1 else None
            report.add(f"{MODEL}: decode {count}: eager / graph", eager_ms[count] / median, "ratio", target=target)
        if graphs:
            outlier = measure(report, runner, f"{MODEL}: decode 127 x 256 and 1 x 8,192", OUTLIER, step_ms)
            uniform = measure(report, runner, f"{MODEL}: decode 128 x 318", UNIFORM, step_ms)
            report.add(f"{MODEL}: outlier / uniform", outlier / uniform, "ratio", target=MAX_OUTLIER)
            for count, ms in graph_ms.items():
                report_parts(report, runner, f"{MODEL}: decode {count} x {CONTEXT:,}", [(1, CONTEXT)] * count, ms)
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def run(report: Report) -> None:
    """Runs the experiment. Needs FlashInfer: the engine has no attention kernel and no graphs without it."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    measure_all(report, MODELS[MODEL])

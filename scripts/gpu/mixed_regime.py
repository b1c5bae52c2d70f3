"""How much does a prefill chunk slow down the decodes in its batch?

The model has Qwen3 8B's shape and random bfloat16 weights, and runs in the engine's runner. Chunks of 128 to 8,192
tokens, each the beginning of a prompt, share a batch with 1 to 256 decodes of 1,024 tokens. The slowdown is the time of
that step over the time of the decodes alone; a note says what both would take one after the other. Finally torch's
profiler shows which kernels take the time of the longest prefill.
"""

from collections.abc import Mapping

from engine.execution.runner import TorchRunner
from scripts.engine_driver import as_in_a_worker
from scripts.gpu.common import require
from scripts.gpu.models import MODELS, Lens, model_config, step_bytes, step_flop
from scripts.gpu.random_model import random_runner, random_step, step_ms
from scripts.gpu.results import Report, Target
from scripts.gpu.step_parts import report_parts

MODEL = "Qwen3-8B"
CONTEXT = 1024
DECODES = (1, 8, 32, 128, 256)
CHUNKS = (128, 512, 2048, 8192)
MIN_PREFILL_SHARE = Target(at_least=0.65)
"""Share of the measured matmul peak that a prefill of 8,192 tokens should reach."""


def measure(report: Report, runner: TorchRunner, name: str, lens: Lens) -> float:
    """Times a step and reports it. Returns the median, ms."""
    times = step_ms(runner.full, random_step(runner, lens), warmup=2, repeats=7)
    ceilings = report.ceilings
    floor = max(ceilings.bytes_ms(step_bytes(runner.config, lens)), ceilings.flop_ms(step_flop(runner.config, lens)))
    report.add(name, times.whole.median, "ms", floor=floor, note=times.note)
    return times.whole.median


def measure_all(report: Report, fields: Mapping[str, object], device: str = "cuda") -> None:
    """Measures all figures of a model with these config.json fields."""
    config = model_config(fields)
    tokens = max(DECODES) * CONTEXT + max(CHUNKS)
    runner = random_runner(fields, tokens=tokens, graph_decodes=max(DECODES), device=device)
    prefill_ms = {}
    for chunk in CHUNKS:
        prefill_ms[chunk] = measure(report, runner, f"{MODEL}: prefill {chunk:,}", [(chunk, chunk)])
    longest = max(CHUNKS)
    share = report.ceilings.flop_ms(step_flop(config, [(longest, longest)])) / prefill_ms[longest]
    report.add(f"{MODEL}: prefill {longest:,}: share of the peak", share, "ratio", target=MIN_PREFILL_SHARE)
    for count in DECODES:
        decodes: list[tuple[int, int]] = [(1, CONTEXT)] * count
        alone = measure(report, runner, f"{MODEL}: decode {count}", decodes)
        for chunk in CHUNKS:
            name = f"{MODEL}: decode {count} with prefill {chunk:,}"
            mixed = measure(report, runner, name, [*decodes, (chunk, chunk)])
            note = f"one after the other: {(alone + prefill_ms[chunk]) / alone:.3g}"
            report.add(f"{name}: slowdown", mixed / alone, "ratio", note=note)
    report_parts(report, runner, f"{MODEL}: prefill {longest:,}", [(longest, longest)], prefill_ms[longest])


def run(report: Report) -> None:
    """Runs the experiment. Needs FlashInfer: the engine has no attention kernel and no graphs without it."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    measure_all(report, MODELS[MODEL])

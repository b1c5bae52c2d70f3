"""Measures a rough profile from a few steps, for workers that start without a profile."""

from itertools import accumulate
from typing import Any

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Profile, ShareProfile, StepCost
from engine.execution.executor import Executor
from engine.profile.steps import RunStep, Step, StepBatches, step_timer

_RUNS = 3
_LONG_MS = 200.0
"""A longer step runs only once."""

_CHUNKS = (1, 16, 64, 256, 1024, 4096)
_SHORT = 256
"""Attention, which a rough profile omits, matters in longer chunks. They are measured only if the device is below full
speed with this one: otherwise any prompt would seem to take as long as reading the weights."""

_FULL_SPEED = 0.75
"""At full speed, time / previous time >= this · tokens / previous tokens."""

_ENOUGH_MS = 100.0
"""Chunks larger than the first one that takes longer than this are not measured."""


def measure_rough_profile(runner: Executor, max_len: int, **labels: Any) -> Profile:
    """Times decodes and prefills on the whole device, in about a second. Time on a share is assumed to scale.

    Args:
        runner: Runner that nothing else uses.
        max_len: Tokens of the longest sequence.
        labels: Other fields of the profile: at least `device` and `model`.
    """
    run = step_timer(runner.full, StepBatches(runner))
    run(Step.decode(1, 1))  # warm-up
    longest = min(max_len, runner.num_pages * BLOCK_SIZE)
    share = ShareProfile(
        share=1,
        decode=_cost(run, {size: Step.decode(size, 1) for size in (1, 8) if size <= runner.num_pages}),
        prefill=_cost(run, {size: Step.prefill(size) for size in _CHUNKS if size <= longest}),
    )
    return Profile(schema="cpd-profile/1", source="measured", shares=(share,), **labels)


def _cost(run: RunStep, steps: dict[int, Step]) -> StepCost:
    times: dict[int, float] = {}
    for tokens, step in steps.items():
        if tokens > _SHORT and _at_full_speed(times):
            break
        times[tokens] = _best_ms(run, step)
        if times[tokens] > _ENOUGH_MS:
            break
    return StepCost(tokens=tuple(times), tokens_ms=tuple(accumulate(times.values(), max)))


def _at_full_speed(times: dict[int, float]) -> bool:
    (fewer, fewer_ms), (more, more_ms) = list(times.items())[-2:]
    return more_ms / fewer_ms >= _FULL_SPEED * more / fewer


def _best_ms(run: RunStep, step: Step) -> float:
    best = run(step)
    for _ in range(_RUNS - 1):
        if best < _LONG_MS:
            best = min(best, run(step))
    return best

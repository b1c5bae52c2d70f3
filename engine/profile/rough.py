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

_ROUNDS_MS = 500.0
"""Rounds of all steps go on until their sum is this: other work on the machine, which disturbs a step, comes and goes
within tenths of a second, and the best time of each step counts."""

_MAX_ROUNDS = 20

_DECODES = (1, 8)
_CHUNKS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
_SHORT = 256
"""Attention, which a rough profile omits, matters in longer chunks. They are measured only if the device is below full
speed with this one: otherwise any prompt would seem to take as long as reading the weights."""

_FULL_SPEED = 0.9
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
    decodes = _times(run, {size: Step.decode(size, 1) for size in _DECODES if size <= runner.num_pages})
    chunks = _times(run, {size: Step.prefill(size) for size in _CHUNKS if size <= longest})
    # Longer chunks are as fast as the last: a line through the last two would guess their speed from a difference.
    last = max(chunks)
    chunks[2 * last] = 2 * max(chunks.values())
    share = ShareProfile(share=1, decode=_cost(decodes), prefill=_cost(chunks))
    return Profile(schema="cpd-profile/1", source="measured", shares=(share,), **labels)


def _cost(times: dict[int, float]) -> StepCost:
    return StepCost(tokens=tuple(times), tokens_ms=tuple(accumulate(times.values(), max)))


def _times(run: RunStep, steps: dict[int, Step]) -> dict[int, float]:
    """Returns the time of each step in ms, up to the first that is long enough."""
    times: dict[int, float] = {}
    for tokens, step in steps.items():
        if tokens > _SHORT and _at_full_speed(times):
            break
        times[tokens] = run(step)
        for _ in range(_RUNS - 1):
            if times[tokens] < _LONG_MS:
                times[tokens] = min(times[tokens], run(step))
        if times[tokens] > _ENOUGH_MS:
            break
    for _ in range(min(_MAX_ROUNDS, int(_ROUNDS_MS / max(sum(times.values()), 1e-6)))):
        times = {tokens: min(ms, run(steps[tokens])) for tokens, ms in times.items()}
    return times


def _at_full_speed(times: dict[int, float]) -> bool:
    (fewer, fewer_ms), (more, more_ms) = list(times.items())[-2:]
    return more_ms / fewer_ms >= _FULL_SPEED * more / fewer

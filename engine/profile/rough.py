"""A rough profile from a few steps, taken in a moment at start where nobody has measured the device."""

from itertools import accumulate
from typing import Any

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Profile, ShareProfile, StepCost
from engine.execution.executor import Executor
from engine.profile.steps import Step, StepBatches, StepTimer

_RUNS = 3
_LONG_MS = 200.0
"""A step that takes longer runs once."""

_CHUNKS = (1, 16, 64, 256, 1024, 4096)
_SHORT = 256
"""In longer chunks attention counts, for which a rough profile has no number. They are tried where a device is not at
full speed yet: it would seem to compute any prompt in the time of reading the weights."""

_FULL_SPEED = 0.75
"""A device is at full speed when the time of a chunk has grown by this part of its tokens, since the chunk before."""

_ENOUGH_MS = 100.0
"""A chunk that takes so long is the largest one that is tried."""


def time_a_few_steps(runner: Executor, max_len: int, **about: Any) -> Profile:
    """Times decodes and prefills on the whole device. Shares of it are taken to scale.

    About a second for most models that a device can serve well.

    Args:
        runner: Nothing else uses it or its pages meanwhile.
        max_len: Tokens of the longest sequence.
        about: What else the profile says: at least `device` and `model`.
    """
    timer = StepTimer(runner.full, StepBatches(runner))
    timer(Step.decode(1, 1))  # the first step of all does things that later ones need not
    longest = min(max_len, runner.num_pages * BLOCK_SIZE)
    share = ShareProfile(
        share=1,
        decode=_cost(timer, {size: Step.decode(size, 1) for size in (1, 8) if size <= runner.num_pages}),
        prefill=_cost(timer, {size: Step.prefill(size) for size in _CHUNKS if size <= longest}),
    )
    return Profile(schema="cpd-profile/1", source="measured", shares=(share,), **about)


def _cost(timer: StepTimer, steps: dict[int, Step]) -> StepCost:
    times: dict[int, float] = {}
    for tokens, step in steps.items():
        if tokens > _SHORT and _at_full_speed(times):
            break
        times[tokens] = _best_ms(timer, step)
        if times[tokens] > _ENOUGH_MS:
            break
    return StepCost(tokens=tuple(times), tokens_ms=tuple(accumulate(times.values(), max)))


def _at_full_speed(times: dict[int, float]) -> bool:
    (fewer, fewer_ms), (more, more_ms) = list(times.items())[-2:]
    return more_ms / fewer_ms >= _FULL_SPEED * more / fewer


def _best_ms(timer: StepTimer, step: Step) -> float:
    best = timer(step)
    for _ in range(_RUNS - 1):
        if best < _LONG_MS:
            best = min(best, timer(step))
    return best

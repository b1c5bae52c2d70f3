"""A rough profile from a few steps, taken in a moment at start where nobody has measured the device."""

from itertools import accumulate
from typing import Any

from cpd.perfmodel import Profile, ShareProfile, StepCost
from engine.batch import Runner
from engine.profile.steps import Step, StepBatches, StepTimer

_RUNS = 3
_LONG_MS = 200.0
"""A step that takes longer runs once."""


def time_a_few_steps(runner: Runner, max_len: int, **about: Any) -> Profile:
    """Times decodes and short prefills on the whole device. Shares of it are taken to scale.

    Under a second for most models that a device can serve well.

    Args:
        runner: Nothing else uses it or its pages meanwhile.
        max_len: Tokens of the longest sequence.
        about: What else the profile says: at least `device` and `model`.
    """
    timer = StepTimer(runner.full, StepBatches(runner))
    timer(Step.decode(1, 1))  # the first step of all does things that later ones need not

    def cost(steps: dict[int, Step]) -> StepCost:
        return StepCost(
            tokens=tuple(steps),
            tokens_ms=tuple(accumulate((_best_ms(timer, step) for step in steps.values()), max)),
        )

    batches = sorted({1, min(8, runner.num_pages)})
    chunks = sorted({min(size, max_len) for size in (1, 16, 64)})
    share = ShareProfile(
        share=1,
        decode=cost({size: Step.decode(size, 1) for size in batches}),
        prefill=cost({size: Step.prefill(size) for size in chunks}),
    )
    return Profile(schema="cpd-profile/1", source="measured", shares=(share,), **about)


def _best_ms(timer: StepTimer, step: Step) -> float:
    best = timer(step)
    for _ in range(_RUNS - 1):
        if best < _LONG_MS:
            best = min(best, timer(step))
    return best

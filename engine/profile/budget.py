"""Measures token budgets of mixed batches: a large budget prefills faster, a small one delays decodes less."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.profile.measure import measure
from engine.profile.steps import RunStep, Step

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """Measurements of one budget.

    Attributes:
        token_budget: Most tokens of a step.
        prefill_ms: Time of the whole prompt, in chunks that share steps with decodes.
        step_ms: The longest of these steps, which is the longest gap between a decode's tokens.
        slowdown: `step_ms` / time of a step of the decodes alone.
    """

    token_budget: int
    prefill_ms: float
    step_ms: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class BudgetSweep:
    """Prefill latency against decode slowdown.

    Attributes:
        decodes, context, prompt: Decoding sequences, tokens of each, and tokens of the prompt.
        decode_ms: Time of a step without the prompt.
        points: Measurements by ascending budget.
        knee: Best compromise, see `knee_of`.
    """

    decodes: int
    context: int
    prompt: int
    decode_ms: float
    points: list[BudgetPoint]
    knee: BudgetPoint


def sweep_budget(
    run: RunStep,
    *,
    decodes: int,
    context: int,
    prompt: int,
    seconds: float,
    budgets: Sequence[int] = BUDGETS,
    on_progress: Callable[[float], None],
) -> BudgetSweep:
    """Measures, for each budget, a prompt that is prefilled in chunks in the same steps as decodes.

    Args:
        decodes: Number of decodes, less than the smallest budget.
        budgets: Budgets, ascending. Of those that compute the prompt in one chunk only the first is measured.
        seconds: Time to spend. Every step runs at least once even if that takes longer.
    """
    decode = Step.decode(decodes, context)
    enough = next((budget for budget in budgets if budget - decodes >= prompt), budgets[-1])
    steps = {budget: _chunks(decode, prompt, budget - decodes) for budget in budgets if budget <= enough}
    series = [[decode], *([step] for chunks in steps.values() for step in chunks)]
    times = dict(measure(run, series, seconds, on_progress))
    decode_ms = times[decode]
    points = [
        BudgetPoint(
            token_budget=budget,
            prefill_ms=sum(times[step] for step in chunks),
            step_ms=(longest := max(times[step] for step in chunks)),
            slowdown=longest / decode_ms,
        )
        for budget, chunks in steps.items()
    ]
    return BudgetSweep(decodes, context, prompt, decode_ms, points, knee_of(points))


def knee_of(points: Sequence[BudgetPoint]) -> BudgetPoint:
    """Finds the point farthest below the line from the first point to the last one, log(prefill) over log(slowdown).

    Below this budget a larger one shortens prefills by a larger factor than it slows decodes, relative to the whole
    range; above it, by a smaller one.
    """
    first, last = points[0], points[-1]
    width = math.log(last.slowdown / first.slowdown)
    slope = math.log(first.prefill_ms / last.prefill_ms) / width if width > 0 else 0.0
    return min(points, key=lambda point: math.log(point.prefill_ms) + slope * math.log(point.slowdown))


def _chunks(decode: Step, prompt: int, size: int) -> list[Step]:
    sizes = [size] * (prompt // size) + [prompt % size] * (prompt % size > 0)
    return [decode + Step.prefill(own, end - own) for own, end in zip(sizes, accumulate(sizes), strict=True)]

"""The token budget of mixed batches: a large one prefills fast, a small one makes decodes wait less."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.profile.measure import RunStep, measure
from engine.profile.steps import Step

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """One budget.

    Attributes:
        token_budget: Tokens a step computes at most.
        prefill_ms: Time of the whole prompt, in chunks beside the decodes.
        step_ms: The longest of its steps: so long a decode waits for its next token.
        stretch: `step_ms` as a multiple of a step of the decodes alone.
    """

    token_budget: int
    prefill_ms: float
    step_ms: float
    stretch: float


@dataclass(frozen=True, slots=True)
class BudgetSweep:
    """Prefill latency against decode stretch.

    Attributes:
        decodes, context, prompt: Decoding sequences, tokens of each, and tokens of the prompt beside them.
        decode_ms: A step without the prompt.
        points: By budget, ascending.
        knee: Where both are good: see `knee_of`.
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
    """Measures a prompt that is prefilled in chunks beside decodes, for each budget.

    Args:
        decodes: Fewer than the least budget.
        budgets: Ascending. Those that take the prompt in one chunk are the same, and only the first of them is tried.
        seconds: To spend; every step is run at least once, however long that takes.
    """
    beside = Step.decode(decodes, context)
    enough = next((budget for budget in budgets if budget - decodes >= prompt), budgets[-1])
    steps = {budget: _chunks(beside, prompt, budget - decodes) for budget in budgets if budget <= enough}
    times = dict(measure(run, [[beside], *([step] for many in steps.values() for step in many)], seconds, on_progress))
    decode_ms = times[beside]
    points = [
        BudgetPoint(
            token_budget=budget,
            prefill_ms=sum(times[step] for step in many),
            step_ms=(longest := max(times[step] for step in many)),
            stretch=longest / decode_ms,
        )
        for budget, many in steps.items()
    ]
    return BudgetSweep(decodes, context, prompt, decode_ms, points, knee_of(points))


def knee_of(points: Sequence[BudgetPoint]) -> BudgetPoint:
    """The point farthest below the line from the first to the last one, prefill over stretch, both logarithmic.

    Up to there a larger budget gains more prefill, as a factor, than it costs stretch, and beyond it less, compared
    with the whole range.
    """
    first, last = points[0], points[-1]
    stretched = math.log(last.stretch / first.stretch)
    slope = math.log(first.prefill_ms / last.prefill_ms) / stretched if stretched > 0 else 0.0
    return min(points, key=lambda point: math.log(point.prefill_ms) + slope * math.log(point.stretch))


def _chunks(beside: Step, prompt: int, size: int) -> list[Step]:
    sizes = [size] * (prompt // size) + [prompt % size] * (prompt % size > 0)
    return [beside + Step.prefill(own, end - own) for own, end in zip(sizes, accumulate(sizes), strict=True)]

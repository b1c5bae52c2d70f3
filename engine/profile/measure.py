"""Chooses the steps to measure, and how often.

It reads no clock: running a step returns its time, and the sum of these is the time spent.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.profile.steps import RunStep, Step

Progress = Callable[[str, float], None]
"""Called with the current task and the fraction of it that is done."""

CONTEXTS = (16, 256, 1024, 4096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BEFORES = (0, 1024, 4096, 16_384)
MIXED_BATCHES = ((4, 256), (4, 2048), (16, 512), (64, 256), (64, 2048))
"""Decodes and tokens of each, in one batch with a chunk."""
MIXED_CHUNKS = (32, 128, 512, 2048)

_LONGEST = 1 / 40
"""A series of growing steps ends with the first one that takes more than this fraction of the total time."""

_MAX_RUNS = 16
_WARM_BELOW_MS = 100.0
"""Shorter steps run once before they count, to warm the caches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a runner's steps.

    Attributes:
        seqs: Most sequences in a batch.
        length: Tokens of the longest sequence.
        pages: Pages in the pool.
    """

    seqs: int
    length: int
    pages: int

    def allow(self, step: Step) -> bool:
        """True if the runner can compute the step."""
        longest = max(tokens + before for tokens, before in step.chunks)
        return len(step.chunks) <= self.seqs and longest <= self.length and step.pages <= self.pages


def decode_series(limits: Limits) -> list[list[Step]]:
    """Returns growing decode batches for each context length."""
    return allowed(limits, [[Step.decode(batch, context) for batch in BATCHES] for context in CONTEXTS])


def prefill_series(limits: Limits) -> list[list[Step]]:
    """Returns growing prefill chunks for each number of cached tokens."""
    return allowed(limits, [[Step.prefill(chunk, before) for chunk in CHUNKS] for before in BEFORES])


def mixed_series(limits: Limits) -> list[list[Step]]:
    """Returns batches of decodes with a growing chunk."""
    return allowed(
        limits,
        [
            [Step.decode(batch, context) + Step.prefill(chunk) for chunk in MIXED_CHUNKS]
            for batch, context in MIXED_BATCHES
        ],
    )


def allowed(limits: Limits, series: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """Returns the series without steps beyond the limits."""
    return [kept for steps in series if (kept := [step for step in steps if limits.allow(step)])]


def measure(
    run: RunStep, series: Sequence[Sequence[Step]], seconds: float, on_progress: Callable[[float], None]
) -> list[tuple[Step, float]]:
    """Measures the typical undisturbed time of steps in ms: the lower quartile of their runs.

    It runs each series from its first step until steps take too long, and then repeats the steps on which it has spent
    the least time.

    Args:
        series: Series of steps, each in the order of growing time.
        seconds: Approximate time to spend.
        on_progress: Called with the fraction of it that is spent.
    """
    budget_ms, spent_ms = 1e3 * seconds, 0.0
    runs: dict[Step, list[float]] = {}

    def repeat(step: Step) -> float:
        nonlocal spent_ms
        times = [run(step)]
        spent_ms += times[0]
        if times[0] < _WARM_BELOW_MS:
            times = [run(step), run(step)]
            spent_ms += sum(times)
        runs.setdefault(step, []).extend(times)
        on_progress(min(1.0, spent_ms / budget_ms))
        return times[-1]

    for steps in series:
        for step in steps:
            if repeat(step) > _LONGEST * budget_ms:
                break
    queue = [(sum(times), index, step) for index, (step, times) in enumerate(runs.items())]
    heapq.heapify(queue)
    while queue and spent_ms < budget_ms:
        _, index, step = heapq.heappop(queue)
        repeat(step)
        if len(runs[step]) < _MAX_RUNS:
            heapq.heappush(queue, (sum(runs[step]), index, step))
    on_progress(1.0)
    return [(step, float(np.quantile(times, 0.25, method="lower"))) for step, times in runs.items()]

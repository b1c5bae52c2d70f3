"""Which steps are measured, and how often.

Reads no clock: whoever runs a step says how long it took, and the time to spend is the sum of that.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.profile.steps import Step

RunStep = Callable[[Step], float]
"""Runs a step and returns how many ms it took."""

Progress = Callable[[str, float], None]
"""Told what is going on, and the fraction of it that is done."""

CONTEXTS = (16, 256, 1024, 4096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BEFORES = (0, 1024, 4096, 16_384)
MIXED_BATCHES = ((4, 256), (4, 2048), (16, 512), (64, 256), (64, 2048))
"""Decodes, and tokens of each, that run with a chunk in one batch."""
MIXED_CHUNKS = (32, 128, 512, 2048)

_LONGEST = 1 / 40
"""A series of growing steps ends with the first one that takes more than this part of all the time."""

_MOST_RUNS = 16
_WARM_BELOW_MS = 100.0
"""Shorter steps run once for the caches before they count, as if the step before had been alike."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the runner can do.

    Attributes:
        seqs: Most sequences in a batch.
        length: Tokens of the longest sequence.
        pages: Of the pool.
    """

    seqs: int
    length: int
    pages: int

    def allow(self, step: Step) -> bool:
        """Whether the step can be run."""
        longest = max(tokens + before for tokens, before in step.chunks)
        return len(step.chunks) <= self.seqs and longest <= self.length and step.pages <= self.pages


def decode_series(limits: Limits) -> list[list[Step]]:
    """Decode batches, growing, for each context."""
    return allowed(limits, [[Step.decode(batch, context) for batch in BATCHES] for context in CONTEXTS])


def prefill_series(limits: Limits) -> list[list[Step]]:
    """Prefill chunks, growing, behind each number of tokens in the cache."""
    return allowed(limits, [[Step.prefill(chunk, before) for chunk in CHUNKS] for before in BEFORES])


def mixed_series(limits: Limits) -> list[list[Step]]:
    """Decodes and a growing chunk in one batch."""
    return allowed(
        limits,
        [
            [Step.decode(batch, context) + Step.prefill(chunk) for chunk in MIXED_CHUNKS]
            for batch, context in MIXED_BATCHES
        ],
    )


def allowed(limits: Limits, series: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """What of the series is within the limits."""
    return [kept for steps in series if (kept := [step for step in steps if limits.allow(step)])]


def measure(
    run: RunStep, series: Sequence[Sequence[Step]], seconds: float, on_progress: Callable[[float], None]
) -> list[tuple[Step, float]]:
    """The typical time in ms of steps when nothing disturbs them: the lower quartile of their runs.

    Every series is gone through from its first step on, until its steps get too long; then those steps are repeated
    that have had the least time.

    Args:
        series: In each the steps take longer and longer.
        seconds: All the time to spend, more or less.
        on_progress: Told the fraction of it that is spent.
    """
    budget_ms, spent_ms = 1e3 * seconds, 0.0
    runs: dict[Step, list[float]] = {}

    def turn(step: Step) -> float:
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
            if turn(step) > _LONGEST * budget_ms:
                break
    queue = [(sum(times), index, step) for index, (step, times) in enumerate(runs.items())]
    heapq.heapify(queue)
    while queue and spent_ms < budget_ms:
        _, index, step = heapq.heappop(queue)
        turn(step)
        if len(runs[step]) < _MOST_RUNS:
            heapq.heappush(queue, (sum(runs[step]), index, step))
    on_progress(1.0)
    return [(step, float(np.quantile(times, 0.25, method="lower"))) for step, times in runs.items()]

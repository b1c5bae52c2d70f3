"""Fits the performance model to measured steps.

The model is linear in its numbers, and none of them is negative: non-negative least squares finds them (Lawson and
Hanson, Solving Least Squares Problems, 1974, chapter 23). A sample counts by its relative error, and the less the
farther it is off, so that a few disturbed measurements change little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cpd.performance.model import MOST_SLOWDOWN, FitError, PerfModel, Profile, ShareProfile, StepCost, Work

KNOT_RATIO = 1.9
"""Knots of the curve over the tokens are at least this far apart."""

FOLDS = 5
"""The error of each fifth of the samples is that of a fit to the others."""

_ROUNDS = 6
_EXACT = 0.02
"""Relative errors below this need not get smaller."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step.

    Attributes:
        work: What it computed.
        ms: How long it took.
        share: How much of the device it had.
        beside: What the other lane ran meanwhile.
    """

    work: Work
    ms: float
    share: float = 1.0
    beside: Work | None = None


def fit_profile(samples: Sequence[Sample], **about: Any) -> Profile:
    """The profile that predicts these samples best, with its error on samples that it was not fitted to.

    Args:
        samples: In any order: at least two of each kind, decodes and prefills, on every share without company, and
            some on the whole device.
        about: What else the profile says: at least `device` and `model`.

    Raises:
        ValueError: There are fewer samples than that.
    """
    ordered = sorted(samples, key=lambda sample: (sample.share, sample.beside is not None, sample.work.is_decode))
    errors: list[float] = []
    for fold in range(FOLDS):
        known = [sample for index, sample in enumerate(ordered) if index % FOLDS != fold]
        errors += prediction_errors(PerfModel(_fit(known, about)), ordered[fold::FOLDS])
    profile = _fit(ordered, about)
    median, p95 = np.quantile(errors, (0.5, 0.95)).tolist()
    return profile.model_copy(update={"error": FitError(samples=len(samples), median=median, p95=p95)})


def prediction_errors(model: PerfModel, samples: Sequence[Sample]) -> list[float]:
    """How far off the model is on each sample: 0.1 is 10 % of the measured time, in either direction."""
    return [abs(model.step_ms(s.work, s.share, s.beside) / s.ms - 1) for s in samples]


def _fit(samples: Sequence[Sample], about: dict[str, Any]) -> Profile:
    shares = sorted({sample.share for sample in samples})
    by_share = [[sample for sample in samples if sample.share == share] for share in shares]
    parts = [
        ShareProfile(share=share, decode=_fit_cost(some, is_decode=True), prefill=_fit_cost(some, is_decode=False))
        for share, some in zip(shares, by_share, strict=True)
    ]
    return Profile(source="measured", shares=tuple(parts), **about)


def _fit_cost(samples: Sequence[Sample], *, is_decode: bool) -> StepCost:
    """Costs of one kind of steps, from all samples of a share."""
    alone = [s for s in samples if s.work.is_decode == is_decode and not s.beside]
    together = [s for s in samples if s.work.is_decode == is_decode and s.beside]
    if not alone:
        kind, share = "decode" if is_decode else "prefill", samples[0].share
        raise ValueError(f"too few {kind} steps were measured without company on the share {share:.3g} of the device")
    knots = _knots([sample.work.tokens for sample in alone])
    numbers = _robust_fit(_design(alone, knots), np.array([sample.ms for sample in alone]))
    seq_ms, context_ms, pair_ms = numbers[len(knots) :].tolist()
    predicted = (_design(together, knots) @ numbers).tolist()
    slowdowns = [sample.ms / ms for sample, ms in zip(together, predicted, strict=True) if ms > 0]
    return StepCost(
        tokens=tuple(knots),
        tokens_ms=tuple(np.cumsum(numbers[: len(knots)]).tolist()),
        seq_ms=seq_ms,
        context_ms=context_ms,
        pair_ms=pair_ms,
        slowdown=min(float(np.median(slowdowns)), MOST_SLOWDOWN) if slowdowns else 1.0,
    )


def _knots(token_counts: Sequence[int]) -> list[int]:
    """1, and measured counts that are far enough apart; something must have been measured within each two of them."""
    least, knots = min(token_counts), [1]
    for count in sorted(set(token_counts)):
        if count >= KNOT_RATIO * max(knots[-1], least):
            knots.append(count)
    return knots


def _design(samples: Sequence[Sample], knots: Sequence[int]) -> FloatArray:
    """What each number of the model counts for in each sample: [samples, numbers].

    The curve's numbers are its value at the first knot and its rise to each next one, so that it never falls. The
    last line goes on beyond its knot. In decodes, sequences and pairs say nothing that tokens and context don't say.
    """
    works = [sample.work for sample in samples]
    tokens = np.array([work.tokens for work in works], float)
    columns = [np.ones_like(tokens)]
    for low, high in pairwise(knots):
        end = np.inf if high == knots[-1] else 1.0
        columns.append(np.clip((tokens - low) / (high - low), 0.0, end))
    rest = [(0, work.context, 0) if work.is_decode else (work.seqs, work.context, work.pairs) for work in works]
    return np.column_stack([*columns, np.array(rest, float).reshape(-1, 3)])


def _robust_fit(design: FloatArray, ms: FloatArray) -> FloatArray:
    """Numbers of least absolute relative error: least squares, weighted by the errors of the round before."""
    weights = 1 / ms
    for _ in range(_ROUNDS):
        numbers = _nnls(design * weights[:, None], ms * weights)
        errors = np.abs(design @ numbers / ms - 1)
        weights = 1 / (ms * np.sqrt(np.maximum(errors, _EXACT)))
    return numbers


def _nnls(a: FloatArray, b: FloatArray) -> FloatArray:
    """The x >= 0 with the least |a x - b|."""
    scale = np.maximum(np.abs(a).max(axis=0), np.finfo(float).tiny)
    a = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    for _ in range(3 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * np.abs(b).sum():
            break
        free[best] = True
        while True:
            target = np.zeros_like(x)
            target[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            blocking = free & (target <= 0)
            if not blocking.any():
                x = target
                break
            x += (x[blocking] / (x[blocking] - target[blocking])).min() * (target - x)
            free &= x > 1e-12
            x[~free] = 0.0
    solution: FloatArray = x / scale
    return solution

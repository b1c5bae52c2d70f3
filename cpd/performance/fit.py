"""Fits the performance model to measured steps.

The model is linear in its coefficients, and none is negative: non-negative least squares finds them (Lawson and Hanson,
Solving Least Squares Problems, 1974, chapter 23). Errors are relative, and samples with larger errors get smaller
weights, so that a few disturbed measurements change little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cpd.performance.model import SLOWDOWN_LIMIT, FitError, PerfModel, Profile, ShareProfile, StepCost, Work

KNOT_RATIO = 1.9
"""Smallest ratio of two adjacent knots of the curve."""

FOLDS = 5
"""Folds of the cross-validation that gives the error."""

_ROUNDS = 6
_EXACT = 0.02
"""Relative errors below this have equal weights."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step.

    Attributes:
        work: Work of the step.
        ms: Measured time.
        share: Share of the device.
        other_lane: Work that the other lane computed at the same time.
    """

    work: Work
    ms: float
    share: float = 1.0
    other_lane: Work | None = None


def fit_profile(samples: Sequence[Sample], **labels: Any) -> Profile:
    """Fits a profile to samples. Its error is that of a cross-validation.

    Args:
        samples: At least two decodes and two prefills on every share with the other lane idle, and some on the whole
            device. The order does not matter.
        labels: Other fields of the profile: at least `device` and `model`.

    Raises:
        ValueError: There are too few samples.
    """
    ordered = sorted(samples, key=lambda sample: (sample.share, sample.other_lane is not None, sample.work.is_decode))
    errors: list[float] = []
    for fold in range(FOLDS):
        known = [sample for index, sample in enumerate(ordered) if index % FOLDS != fold]
        errors += prediction_errors(PerfModel(_fit(known, labels)), ordered[fold::FOLDS])
    profile = _fit(ordered, labels)
    median, p95 = np.quantile(errors, (0.5, 0.95)).tolist()
    return profile.model_copy(update={"error": FitError(samples=len(samples), median=median, p95=p95)})


def prediction_errors(model: PerfModel, samples: Sequence[Sample]) -> list[float]:
    """Returns the absolute relative error of the model on each sample: 0.1 is 10 % of the measured time."""
    return [abs(model.step_ms(s.work, s.share, s.other_lane) / s.ms - 1) for s in samples]


def _fit(samples: Sequence[Sample], labels: dict[str, Any]) -> Profile:
    shares = sorted({sample.share for sample in samples})
    by_share = [[sample for sample in samples if sample.share == share] for share in shares]
    parts = [
        ShareProfile(share=share, decode=_fit_cost(some, is_decode=True), prefill=_fit_cost(some, is_decode=False))
        for share, some in zip(shares, by_share, strict=True)
    ]
    return Profile(source="measured", shares=tuple(parts), **labels)


def _fit_cost(samples: Sequence[Sample], *, is_decode: bool) -> StepCost:
    """Fits the coefficients of one kind of step to the samples of a share."""
    alone = [s for s in samples if s.work.is_decode == is_decode and not s.other_lane]
    together = [s for s in samples if s.work.is_decode == is_decode and s.other_lane]
    if not alone:
        kind, share = "decode" if is_decode else "prefill", samples[0].share
        raise ValueError(f"too few {kind} steps were measured alone on the share {share:.3g} of the device")
    knots = _knots([sample.work.tokens for sample in alone])
    coefficients = _robust_fit(_design(alone, knots), np.array([sample.ms for sample in alone]))
    seq_ms, context_ms, pair_ms = coefficients[len(knots) :].tolist()
    predicted = (_design(together, knots) @ coefficients).tolist()
    slowdowns = [sample.ms / ms for sample, ms in zip(together, predicted, strict=True) if ms > 0]
    return StepCost(
        tokens=tuple(knots),
        tokens_ms=tuple(np.cumsum(coefficients[: len(knots)]).tolist()),
        seq_ms=seq_ms,
        context_ms=context_ms,
        pair_ms=pair_ms,
        slowdown=min(float(np.median(slowdowns)), SLOWDOWN_LIMIT) if slowdowns else 1.0,
    )


def _knots(token_counts: Sequence[int]) -> list[int]:
    """Chooses knots: 1 and measured token counts that are far enough apart."""
    least, knots = min(token_counts), [1]
    for count in sorted(set(token_counts)):
        if count >= KNOT_RATIO * max(knots[-1], least):
            knots.append(count)
    return knots


def _design(samples: Sequence[Sample], knots: Sequence[int]) -> FloatArray:
    """Returns the design matrix of the samples: [samples, coefficients].

    The curve's coefficients are its value at the first knot and its rise to each next one, so that it never falls. The
    last line continues beyond its knot. For decodes, sequences and pairs are redundant: they equal tokens and context.
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
    """Minimises absolute relative errors by least squares, weighted by the errors of the previous round."""
    weights = 1 / ms
    for _ in range(_ROUNDS):
        coefficients = _nnls(design * weights[:, None], ms * weights)
        errors = np.abs(design @ coefficients / ms - 1)
        weights = 1 / (ms * np.sqrt(np.maximum(errors, _EXACT)))
    return coefficients


def _nnls(a: FloatArray, b: FloatArray) -> FloatArray:
    """Finds the x >= 0 that minimises |a x - b|."""
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

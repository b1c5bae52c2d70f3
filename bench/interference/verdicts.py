"""Findings of a grid of bursts: how the increase depends on their size, recovery, and the effect on prefill.

The shape is the curve that fits the cells best, by the Bayesian information criterion on log(gap during / gap before):

    linear    1 + b x           one step computes a whole burst
    plateau   1 + min(b x, h)   a step computes a limited number of prompt tokens
    step      l or h            small bursts are hidden in a step, larger ones cost a full step
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from statistics import mean, median
from typing import Literal

import numpy as np
import numpy.typing as npt

from bench.interference.result import Burst, Cell, Shape, Tone, Verdict

SMALL_PERCENT = 10.0
RECOVERED_PERCENT = 5.0
LARGE_PERCENT = 100.0
CLIENT_LATE_SHARE = 0.5
NOISY_RATIO = 1.2

_MIN_SIZES = 4  # every curve fits fewer sizes
_NOISE = 0.03  # error of the cells, below which no fit counts as better
_BAD_FIT = 0.4  # error with which a typical cell is off by half


def shape(cells: Sequence[Cell]) -> Shape:
    """Finds how the increase depends on the prompt tokens of a burst."""
    worst: dict[int, float] = {}
    for cell in cells:
        if cell.increase_percent is not None:
            worst[cell.size] = max(worst.get(cell.size, -100.0), cell.increase_percent.median)
    sizes = sorted(worst)
    above = next((size for size in sizes if worst[size] > SMALL_PERCENT), None)
    below = max((size for size in sizes if above is None or size < above), default=0)
    if above is None:
        return Shape(kind="none" if sizes else "unclear", below=below, above=None)
    points = [(cell.size, cell.increase_percent) for cell in cells]
    x = np.array([size for size, increase in points if increase])
    y = np.log([max(1 + increase.median / 100, 0.01) for _, increase in points if increase])
    if len(sizes) < _MIN_SIZES:
        return Shape(kind="unclear", below=below, above=above)
    best = min((_linear(x, y), _plateau(x, y), _step(x, y, sizes)), key=lambda fit: fit.score(len(x)))
    if best.error > _BAD_FIT:
        return Shape(kind="unclear", below=below, above=above)
    return Shape(
        kind=best.kind,
        below=below,
        above=above,
        jump=best.jump,
        percent_per_1000_tokens=best.percent_per_1000_tokens,
        level_percent=best.level_percent,
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fitted curve. `error` is the root mean square of its residuals."""

    kind: Literal["linear", "step", "plateau"]
    error: float
    parameters: int
    jump: tuple[int, int] | None = None
    percent_per_1000_tokens: float | None = None
    level_percent: float | None = None

    def score(self, count: int) -> float:
        """The Bayesian information criterion; lower is better."""
        return count * log(self.error**2 + _NOISE**2) + self.parameters * log(count)


def _linear(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64]) -> _Fit:
    slopes = np.geomspace(1e-3, 1e4, 700) / x.max()
    errors = _rms(np.log1p(slopes[:, None] * x) - y)
    best = int(errors.argmin())
    return _Fit("linear", float(errors[best]), 1, percent_per_1000_tokens=float(slopes[best]) * 1e5)


def _plateau(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64]) -> _Fit:
    knees = np.geomspace(x.min() / 2, x.max(), 100)[:, None, None]
    levels = np.geomspace(1e-2, 1e4, 300)[None, :, None]
    errors = _rms(np.log1p(levels * np.minimum(x / knees, 1)) - y)
    knee, level = np.unravel_index(errors.argmin(), errors.shape)
    tokens, rise = float(knees[knee, 0, 0]), float(levels[0, level, 0]) * 100
    slope = rise / tokens * 1e3 if tokens > x.min() else None
    return _Fit("plateau", float(errors.min()), 2, percent_per_1000_tokens=slope, level_percent=rise)


def _step(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64], sizes: Sequence[int]) -> _Fit:
    fits = []
    for low, high in pairwise(sizes):
        before, after = y[x <= low].mean(), y[x > low].mean()
        error = float(_rms(np.where(x <= low, before, after) - y)) if after > before else inf
        fits.append(_Fit("step", error, 3, jump=(low, high), level_percent=float(np.expm1(after)) * 100))
    return min(fits, key=lambda fit: fit.error)


def _rms(residuals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.sqrt(np.mean(residuals**2, axis=-1)))


def tone_of(increase_percent: float) -> Tone:
    """Rates an increase."""
    if increase_percent <= SMALL_PERCENT:
        return "good"
    return "warn" if increase_percent <= LARGE_PERCENT else "bad"


def is_client_late(burst: Burst) -> bool:
    """True if the longest gap may come from the client instead of the server."""
    return burst.client_late_ms > CLIENT_LATE_SHARE * burst.during.max_ms


def verdicts(cells: Sequence[Cell], found: Shape) -> list[Verdict]:
    """The findings in sentences: shape and threshold, recovery, effect of decode on prefill, and doubts."""
    measured = [cell for cell in cells if cell.bursts]
    if not measured:
        return [Verdict(tone="bad", text="Nothing was measured.")]
    return [_shape_verdict(measured, found), _recovery(measured), _prefill(measured), *_doubts(measured)]


def _shape_verdict(cells: Sequence[Cell], found: Shape) -> Verdict:
    peak = max(cell.increase_percent.median for cell in cells if cell.increase_percent)
    if found.kind == "none":
        return Verdict(
            tone="good",
            text=f"Bursts of up to {found.below:,} tokens don't disturb decoding: the mean gap grows by at most "
            f"{SMALL_PERCENT:.0f} % ({peak:+.0f} %).",
        )
    slope = f"{found.percent_per_1000_tokens:.0f} % per 1,000 tokens" if found.percent_per_1000_tokens else ""
    level = f"{found.level_percent:.0f} %" if found.level_percent else ""
    how = {
        "linear": f"The gaps grow in proportion to the burst, by {slope}.",
        "plateau": f"The gaps grow with the burst{', by ' + slope if slope else ''}, and level off at +{level}.",
        "step": f"The gaps jump between {found.jump[0]:,} and {found.jump[1]:,} tokens, to +{level}."
        if found.jump
        else "",
        "unclear": "How the gaps grow with the burst is unclear: "
        + ("no curve fits." if len({cell.size for cell in cells}) >= _MIN_SIZES else "the grid has too few sizes."),
    }[found.kind]
    threshold = (
        f"Bursts of up to {found.below:,} tokens stay within +{SMALL_PERCENT:.0f} %."
        if found.below
        else f"Even the smallest burst, {found.above:,} tokens, costs more than +{SMALL_PERCENT:.0f} %."
    )
    return Verdict(
        tone="bad" if peak > LARGE_PERCENT else "warn", text=f"{how} {threshold} The largest is {peak:+,.0f} %."
    )


def _recovery(cells: Sequence[Cell]) -> Verdict:
    bursts = [(cell, burst) for cell in cells for burst in cell.bursts]
    lost = sorted({cell.name for cell, burst in bursts if burst.recovery_s is None})
    if lost:
        return Verdict(
            tone="bad",
            text=f"Decoding isn't back to within {RECOVERED_PERCENT:.0f} % in time after bursts of {', '.join(lost)}.",
        )
    times_s = [burst.recovery_s for _, burst in bursts if burst.recovery_s is not None]
    return Verdict(
        tone="good",
        text=f"Decoding recovers to within {RECOVERED_PERCENT:.0f} % after every burst: after "
        f"{mean(times_s):.2f} s on average, {max(times_s):.2f} s at most.",
    )


def _prefill(cells: Sequence[Cell]) -> Verdict:
    ratios = [cell.ttft_ms.median / cell.idle_ttft_ms.median for cell in cells if cell.ttft_ms and cell.idle_ttft_ms]
    typical = median(ratios)
    return Verdict(
        tone="good" if typical < 1 + SMALL_PERCENT / 100 else "warn",
        text=f"Beside decode streams, the injected prompts wait {typical:.2f} times as long for their first token as "
        f"on an idle server ({min(ratios):.2f} to {max(ratios):.2f} by kind of burst).",
    )


def _doubts(cells: Sequence[Cell]) -> list[Verdict]:
    return [*_noise(cells), *_odd_bursts(cells)]


def _noise(cells: Sequence[Cell]) -> list[Verdict]:
    """Doubts about baselines: equal decode streams should have equal gaps before every burst."""
    before_ms = [burst.before.mean_ms for cell in cells for burst in cell.bursts]
    low_ms, high_ms = (float(value) for value in np.percentile(before_ms, [10, 90]))
    if high_ms <= NOISY_RATIO * low_ms:
        return []
    return [
        Verdict(
            tone="bad",
            text=f"Without a burst, the mean gap varied from {low_ms:.2f} to {high_ms:.2f} ms (10th and 90th "
            "percentile): something else disturbs the server, and smaller effects are not meaningful.",
        )
    ]


def _odd_bursts(cells: Sequence[Cell]) -> list[Verdict]:
    bursts = [burst for cell in cells for burst in cell.bursts]
    doubts = {
        "the server was still busy with requests whose clients had gone": sum(not burst.drained for burst in bursts),
        "decoding was not steady before": sum(not burst.steady for burst in bursts),
        "decode streams were restarted, so that recovery was seen late (use a larger --decode-output-len)": (
            sum(burst.restarts > 0 for burst in bursts)
        ),
        "the client's own delays make up much of the longest gap": sum(is_client_late(burst) for burst in bursts),
        "injected prompts failed": sum(bool(burst.failed) for burst in bursts),
    }
    return [
        Verdict(tone="warn", text=f"In {count} of {len(bursts)} bursts {what}.")
        for what, count in doubts.items()
        if count
    ]

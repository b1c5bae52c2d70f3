"""Data of charts as arrays, with few points for any number of requests, so that a page stays small."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bench.result import Request
from bench.statistics import Floats

CDF_POINTS = 200
SCATTER_POINTS = 1500
TIME_BINS = 120
HISTOGRAM_BINS = 60
LOG_SPREAD = 10.0  # an axis is logarithmic if the maximum is this many times the median
_TICKS = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
LOG_AXIS: dict[str, Any] = {
    "type": "log",
    "tickmode": "array",
    "tickvals": _TICKS,
    "ticktext": [f"{tick:g}" if tick < 1000 else f"{tick / 1000:g}k" for tick in _TICKS],
}
"""A logarithmic axis whose ticks all say what they are; plotly's own leave the powers of ten out."""

LEAST_MS = 0.1  # start of a logarithmic latency axis: chunks read together have almost no gap


@dataclass(frozen=True, slots=True)
class Series:
    """Requests drawn in one colour: a run, or one of its routes."""

    name: str
    colour: str
    requests: Sequence[Request]

    @property
    def completed(self) -> list[Request]:
        """Requests without an error; only they have latencies."""
        return [request for request in self.requests if not request.error]


def latencies(series: Series, figure: str) -> Floats:
    """One latency of all completed requests that have it, in ms; for `itl_ms` all gaps of all requests."""
    values = [getattr(request, figure) for request in series.completed]
    if figure == "itl_ms":
        return np.concatenate([np.empty(0), *values])
    return np.array([value for value in values if value is not None])


def tail(share: Floats) -> Floats:
    """Position of a share of requests on an axis with equal distances of 90 %, 99 % and 99.9 %, at 1, 2 and 3."""
    return -np.log10(1 - share)


def cdf(values: Floats) -> tuple[Floats, Floats]:
    """Points of the cumulative distribution up to 99.9 %, evenly spaced in `tail`: (values, shares below)."""
    if not values.size:
        return values, values
    last = min(3.0, float(np.log10(len(values) + 1)))
    shares = 1 - 10 ** -np.linspace(0, last, min(CDF_POINTS, len(values) + 1))
    return np.quantile(values, shares), shares


def spread_wide(groups: Sequence[Floats]) -> bool:
    """True if values need a logarithmic axis."""
    values = np.concatenate([np.empty(0), *groups])
    return bool(values.size) and float(values.max()) > LOG_SPREAD * max(LEAST_MS, float(np.median(values)))


def latency_axis(wide: bool) -> dict[str, Any]:
    """Scale of an axis; `wide` comes from `spread_wide`."""
    return LOG_AXIS if wide else {"rangemode": "tozero"}


def thin(requests: Sequence[Request], height: Callable[[Request], float | None]) -> list[Request]:
    """About SCATTER_POINTS of the requests at most, evenly chosen, and all of the highest."""
    if len(requests) <= SCATTER_POINTS:
        return list(requests)
    by_height = sorted(range(len(requests)), key=lambda index: height(requests[index]) or 0.0)
    kept = {*range(0, len(requests), -(-len(requests) // SCATTER_POINTS)), *by_height[-SCATTER_POINTS // 10 :]}
    return [requests[index] for index in sorted(kept)]


def bin_width_s(duration_s: float) -> float:
    """A round bin width (1, 2 or 5 times a power of ten), at least 0.1 s, for at most TIME_BINS bins."""
    least = max(duration_s / TIME_BINS, 0.1)
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9)))


def chunk_times_s(request: Request) -> Floats:
    """Times of the chunks with text, in seconds from the start of the run."""
    if request.ttft_ms is None:
        return np.empty(0)
    return request.due_s + np.cumsum([request.ttft_ms, *request.itl_ms]) / 1e3


def tokens_per_s(requests: Sequence[Request], edges: Floats) -> Floats:
    """Output tokens per second in each time bin. A chunk counts as the request's average tokens per chunk, or as one
    token if the server sends no counts."""
    times, weights = [np.empty(0)], [np.empty(0)]
    for request in requests:
        chunks = chunk_times_s(request)
        times.append(chunks)
        tokens = request.output_tokens if request.output_tokens is not None else len(chunks)
        weights.append(np.full(len(chunks), tokens / max(1, len(chunks))))
    counts, _ = np.histogram(np.concatenate(times), edges, weights=np.concatenate(weights))
    per_s: Floats = counts / np.diff(edges)
    return per_s


def in_flight(requests: Sequence[Request], edges: Floats) -> Floats:
    """Average number of requests in flight in each time bin."""
    began = _seconds_since([request.sent_s for request in requests], edges)
    ended = _seconds_since([request.ended_s for request in requests], edges)
    mean: Floats = np.diff(began - ended) / np.diff(edges)
    return mean


def _seconds_since(events_s: Sequence[float], times_s: Floats) -> Floats:
    """For each time, the sum of the seconds since each earlier event."""
    ordered = np.sort(events_s)
    before = np.searchsorted(ordered, times_s)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    total: Floats = before * times_s - sums[before]
    return total


def gaps_over_time(requests: Sequence[Request], edges: Floats, percentiles: Sequence[float]) -> Floats:
    """Percentiles of the gaps that ended in each time bin, in ms: [percentiles, bins], NaN in empty bins."""
    times = np.concatenate([np.empty(0), *(chunk_times_s(request)[1:] for request in requests)])
    gaps = np.concatenate([np.empty(0), *(request.itl_ms for request in requests if request.ttft_ms is not None)])
    order = np.argsort(times)
    times, gaps = times[order], gaps[order]
    bins = [gaps[start:end] for start, end in pairwise(np.searchsorted(times, edges))]
    columns = [np.percentile(part, percentiles) if part.size else np.full(len(percentiles), np.nan) for part in bins]
    return np.array(columns).reshape(len(bins), len(percentiles)).T


def histogram(groups: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
    """Histogram with bins of equal width on a logarithmic axis: (edges, shares in % of each group). Values below
    LEAST_MS count in the first bin."""
    values = np.concatenate([np.empty(0), *groups])
    low = max(float(values.min()), LEAST_MS)
    high = max(float(values.max()), low * 1.01)
    edges = np.geomspace(low, high * (1 + 1e-9), HISTOGRAM_BINS + 1)
    return edges, [100 * np.histogram(np.maximum(group, low), edges)[0] / max(1, group.size) for group in groups]

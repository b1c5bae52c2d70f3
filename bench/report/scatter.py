"""Charts with one point per request."""

from collections.abc import Callable, Sequence

import numpy as np

from bench.report.curves import LEAST_MS, Series, latency_axis, spread_wide, thin
from bench.report.page import Chart
from bench.result import Request
from bench.statistics import Floats

Value = Callable[[Request], float | None]


def ttft_over_time(series: Sequence[Series]) -> Chart | None:
    """TTFT by due time; None without values. Rising points show a server that falls behind."""
    completed = [Series(one.name, one.colour, one.completed) for one in series]
    axes = ("due, seconds from the start", "TTFT, ms")
    return _scatter("TTFT of each request over time", completed, axes, lambda request: request.due_s, _ttft_ms)


def ttft_by_prompt(series: Sequence[Series], *, uncached: bool) -> Chart | None:
    """TTFT by prompt tokens, or by `uncached` prompt tokens.

    None without values, or if no cached tokens are known.
    """
    completed = [Series(one.name, one.colour, one.completed) for one in series]
    if not uncached:
        return _scatter(
            "TTFT against prompt length", completed, ("prompt tokens", "TTFT, ms"), _prompt_tokens, _ttft_ms
        )
    if not any(request.cached_tokens for one in completed for request in one.requests):
        return None
    axes = ("uncached prompt tokens", "TTFT, ms")
    return _scatter("TTFT against uncached prompt tokens", completed, axes, _uncached_tokens, _ttft_ms)


def schedule_lag(series: Sequence[Series]) -> Chart | None:
    """Lateness of each request's sending, the client's own delay; None without requests."""
    axes = ("due, seconds from the start", "sent late by, ms")
    return _scatter("How late the client sent", series, axes, lambda request: request.due_s, _lag_ms)


def _scatter(title: str, series: Sequence[Series], axes: tuple[str, str], x: Value, y: Value) -> Chart | None:
    points = [_points(one, x, y) for one in series]
    wide = spread_wide([heights for _, heights in points])
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": np.round(across, 3),
            "y": np.round(np.maximum(heights, LEAST_MS) if wide else heights, 3),
            "name": one.name,
            "marker": {"color": one.colour, "size": 5, "opacity": 0.65},
            "hovertemplate": f"{axes[1]}: %{{y:,.4~g}}<br>{axes[0]}: %{{x:,.4~g}}<extra>%{{fullData.name}}</extra>",
        }
        for one, (across, heights) in zip(series, points, strict=True)
        if across.size
    ]
    if not traces:
        return None
    layout = {
        "xaxis": {"title": {"text": axes[0]}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": axes[1]}, **latency_axis(wide)},
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
    }
    return Chart(title, traces, layout)


def _points(one: Series, x: Value, y: Value) -> tuple[Floats, Floats]:
    """Positions of the requests that have both values."""
    known = [
        (across, height)
        for request in thin(one.requests, y)
        if (across := x(request)) is not None and (height := y(request)) is not None
    ]
    points = np.array(known, dtype=np.float64).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _ttft_ms(request: Request) -> float | None:
    return request.ttft_ms


def _lag_ms(request: Request) -> float:
    return 1e3 * (request.sent_s - request.due_s)


def _prompt_tokens(request: Request) -> int | None:
    return request.prompt_tokens or request.input_len or None


def _uncached_tokens(request: Request) -> int | None:
    tokens = _prompt_tokens(request)
    return None if tokens is None else tokens - (request.cached_tokens or 0)

"""Charts over time of a run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report.curves import (
    LEAST_MS,
    Series,
    bin_width_s,
    gaps_over_time,
    in_flight,
    spread_wide,
    tokens_per_s,
)
from bench.report.page import Chart
from bench.result import Request, Steady

_PANEL = 0.27  # height of each of the three panels, as a share of the chart
_CROSSES = 100  # most crosses for failures
_PANELS = ("Output tokens/s", "Requests in flight", "ITL, ms: p99; dotted: the slowest")


def timeline(series: Sequence[Series], steady: Steady | None = None) -> Chart | None:
    """Throughput, requests in flight with failures, and ITL in panels on one time axis.

    Args:
        series: One per run.
        steady: The steady window to mark.
    """
    series = [one for one in series if one.requests]
    if not series:
        return None
    end_s = max(_end_s(one) for one in series)
    traces = [trace for one in series for trace in _run_traces(one, bin_width_s(end_s), alone=len(series) == 1)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds from the start"}, "anchor": "y3", "range": [0, 1.01 * end_s]},
        "hoversubplots": "axis",
        "annotations": [_panel_title(number, text) for number, text in enumerate(_PANELS)],
    }
    for number in range(len(_PANELS)):
        layout[_axis("yaxis", number)] = {"domain": _domain(number), "rangemode": "tozero", "nticks": 5}
    gaps = [np.array(trace["y"]) for trace in traces if trace["yaxis"] == "y3"]
    if spread_wide([values[np.isfinite(values)] for values in gaps]):
        layout["yaxis3"] |= {"type": "log", "dtick": 1}
    if steady:
        layout["shapes"] = [_ramp(0, steady.start_s), _ramp(steady.end_s, 1.01 * end_s)]
    note = "Shaded: ramp-up and drain, outside the steady window." if steady else ""
    return Chart("Over time", traces, layout, note=note, height=640, wide=True)


def requests_by_worker(requests: Sequence[Request]) -> Chart | None:
    """A heat map of the requests that each worker got; None if fewer than two workers are known.

    A router that oscillates shows as a row that is bright and dark in turn.
    """
    workers = sorted({request.worker for request in requests if request.worker}, key=_natural)
    if len(workers) < 2:
        return None
    end_s = max(request.due_s for request in requests)
    width_s = 4 * bin_width_s(end_s)
    edges = width_s * np.arange(int(end_s / width_s) + 2, dtype=np.float64)
    counts = [
        np.histogram([request.due_s for request in requests if request.worker == worker], edges)[0]
        for worker in workers
    ]
    trace = {
        "type": "heatmap",
        "x": np.round((edges[:-1] + edges[1:]) / 2, 4),
        "y": workers,
        "z": [[int(count) for count in row] for row in counts],
        "colorscale": "$heat",
        "colorbar": {"title": {"text": "requests"}},
        "hovertemplate": "%{y}, %{x:,.4~g} s: %{z:,} requests<extra></extra>",
    }
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "due, seconds from the start"}, "showgrid": False},
        "yaxis": {"type": "category", "showgrid": False, "automargin": True},
        "hovermode": "closest",
    }
    return Chart("Requests of each worker over time", [trace], layout, height=max(240, 24 * len(workers)), wide=True)


def _natural(name: str) -> tuple[int, str]:
    """Sorts names that end in numbers by the number, if the rest is equally long."""
    return len(name), name


def _end_s(one: Series) -> float:
    return max(request.ended_s for request in one.requests)


def _run_traces(one: Series, width_s: float, *, alone: bool) -> list[dict[str, Any]]:
    edges = width_s * np.arange(int(_end_s(one) / width_s) + 2, dtype=np.float64)
    middles = np.round((edges[:-1] + edges[1:]) / 2, 4)
    p99, slowest = np.maximum(LEAST_MS, np.round(gaps_over_time(one.requests, edges, [99, 100]), 3))
    lines = [
        ("y", np.round(tokens_per_s(one.requests, edges), 1), "tokens/s", {}),
        ("y2", np.round(in_flight(one.requests, edges), 2), "in flight", {}),
        ("y3", p99, "ms, ITL p99", {}),
        ("y3", slowest, "ms, slowest ITL", {"width": 1, "dash": "dot"}),
    ]
    traces: list[dict[str, Any]] = [
        {
            "x": middles,
            "y": values,
            "yaxis": axis,
            "name": one.name,
            "legendgroup": one.name,
            "showlegend": axis == "y" and not alone,
            "mode": "lines",
            "line": {"color": one.colour, "width": 2, **style},
            "hovertemplate": f"%{{y:,.4~g}} {what}<extra>{'' if alone else '%{fullData.name}'}</extra>",
        }
        for axis, values, what, style in lines
    ]
    failed = [request for request in one.requests if request.error]
    if failed:
        traces.append(_failures(one, failed, traces[1]))
    return traces


def _failures(one: Series, failed: Sequence[Request], line: dict[str, Any]) -> dict[str, Any]:
    """Crosses on the line of requests in flight."""
    failed = failed[:: -(-len(failed) // _CROSSES)]
    times = np.array([request.ended_s for request in failed])
    return {
        "legendgroup": one.name,
        "showlegend": False,
        "mode": "markers",
        "x": np.round(times, 3),
        "y": np.round(np.interp(times, line["x"], line["y"]), 2),
        "yaxis": "y2",
        "marker": {"color": "$bad", "symbol": "x", "size": 7},
        "text": [request.error for request in failed],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _axis(name: str, number: int) -> str:
    return name if number == 0 else f"{name}{number + 1}"


def _domain(number: int) -> list[float]:
    top = 0.955 - number * (1 - _PANEL) / (len(_PANELS) - 1) * 0.94
    return [max(0.0, top - _PANEL), top]


def _panel_title(number: int, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": _domain(number)[1],
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "$text"},
    }


def _ramp(start_s: float, end_s: float) -> dict[str, Any]:
    place = {"type": "rect", "x0": start_s, "x1": end_s, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    return {**place, "fillcolor": "$line", "opacity": 0.35, "line": {"width": 0}}

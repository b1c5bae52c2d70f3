"""Charts of latency distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report.curves import LEAST_MS, LOG_AXIS, Series, cdf, histogram, latencies, latency_axis, spread_wide, tail
from bench.report.page import Chart

_SHARES = np.array([0, 0.5, 0.9, 0.99, 0.999])
_SHARE_NAMES = ["0", "50 %", "90 %", "99 %", "99.9 %"]


def cdf_chart(name: str, figure: str, series: Sequence[Series], limit_ms: float | None = None) -> Chart | None:
    """The cumulative distribution of a latency, one line per series; None without values.

    Args:
        name: Name, such as "TTFT".
        figure: Field of Request.
        series: The series to overlay.
        limit_ms: Target, drawn as a line.
    """
    groups = [latencies(one, figure) for one in series]
    wide = spread_wide(groups)
    traces = []
    for one, values in zip(series, groups, strict=True):
        if not values.size:
            continue
        at, shares = cdf(np.maximum(values, LEAST_MS) if wide else values)
        traces.append(
            {
                "x": np.round(at, 3),
                "y": np.round(tail(shares), 4),
                "customdata": np.round(100 * shares, 3),
                "name": one.name,
                "line": {"color": one.colour, "width": 2},
                "hovertemplate": "%{customdata:.4g} % within %{x:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    if not traces:
        return None
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"{name}, ms"}, **latency_axis(wide)},
        "yaxis": {"tickvals": tail(_SHARES), "ticktext": _SHARE_NAMES, "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
    }
    if limit_ms is not None:
        layout |= _target(limit_ms)
    return Chart(f"{name}: CDF of {'gaps' if figure == 'itl_ms' else 'requests'}", traces, layout)


def itl_histogram(series: Sequence[Series]) -> Chart | None:
    """Histogram of the gaps between chunks; None without gaps."""
    groups = [latencies(one, "itl_ms") for one in series]
    if not any(values.size for values in groups):
        return None
    edges, shares = histogram(groups)
    floor = min(share[share > 0].min() for share in shares if share.any()) / 2  # a logarithmic axis has no zero
    traces = [
        {
            "x": np.round(edges, 4),
            "y": np.append(np.maximum(share, floor), floor),
            "name": one.name,
            "mode": "lines",
            "line": {"color": one.colour, "width": 1.5, "shape": "hv"},
            "hovertemplate": "%{y:.3~g} % of gaps from %{x:,.4~g} ms<extra>%{fullData.name}</extra>",
        }
        for one, share in zip(series, shares, strict=True)
        if share.any()
    ]
    visible = [float(np.log10(1.2 * floor)), 2.1]
    layout = {
        "xaxis": {**LOG_AXIS, "title": {"text": "gap, ms"}},
        "yaxis": {"type": "log", "dtick": 1, "range": visible, "title": {"text": "% of gaps"}},
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
    }
    return Chart("ITL: histogram of gaps", traces, layout)


def _target(limit_ms: float) -> dict[str, Any]:
    line = {"color": "$muted", "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "x0": limit_ms, "x1": limit_ms, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    label = {"text": "target", "font": {"color": "$muted"}, "textposition": "start", "textangle": 0, "xanchor": "right"}
    return {"shapes": [{**shape, "label": label}]}

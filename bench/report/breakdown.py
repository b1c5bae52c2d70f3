"""Breaks a run down by phase, route, turn and failure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report.curves import Series
from bench.report.page import Cell, Chart, Table, error_bars, series
from bench.report.text import interval, milliseconds, number, percent
from bench.result import Group, Request, Result, Stat

_PHASES = (("until sent", "$muted"), ("until the first token", series(0)), ("until the end", series(1)))
_SLOWEST = 0.01


def phase_chart(groups: Sequence[Series]) -> Chart | None:
    """Mean E2E latency of each group, divided into the client's delay, the first token and the rest."""
    rows = [(one.name, _phases_ms(requests)) for one in groups if (requests := _phased(one.requests))]
    if not rows:
        return None
    rows.reverse()  # plotly draws upwards
    totals = [milliseconds(sum(phases)) for _, phases in rows]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [name for name, _ in rows],
            "x": [round(phases[index], 3) for _, phases in rows],
            "name": phase,
            "marker": {"color": colour, "line": {"color": "$surface", "width": 1}},
            "hovertemplate": "%{x:,.4~g} ms " + phase + "<extra></extra>",
        }
        for index, (phase, colour) in enumerate(_PHASES)
    ]
    traces[-1] |= {"text": totals, "textposition": "outside", "cliponaxis": False, "textfont": {"color": "$text"}}
    longest_ms = max(sum(phases) for _, phases in rows)
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "mean, ms"}, "range": [0, 1.35 * longest_ms]},
        "yaxis": {"type": "category", "showgrid": False, "tickfont": {"color": "$text"}},
        "hovermode": "y unified",
        "legend": {"traceorder": "normal"},
    }
    return Chart("Phases of a request", traces, layout, height=110 + 44 * len(rows))


def slowest(name: str, requests: Sequence[Request]) -> Series:
    """The 1 % of the completed requests with the longest E2E latency, at least one."""
    completed = sorted(_phased(requests), key=lambda request: request.e2e_ms or 0.0, reverse=True)
    return Series(name, "", completed[: max(1, round(_SLOWEST * len(completed)))])


def group_table(title: str, groups: Sequence[tuple[str, Group]]) -> Table | None:
    """A row for each turn or route; None if there are none.

    Args:
        title: Title of the table.
        groups: (name of the run, group); the name may be empty.
    """
    if not groups:
        return None
    columns = ["done", "failed", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "E2E p50", "cached"]
    rows: list[list[str | Cell]] = [
        [
            Cell(group.name, run),
            f"{group.completed:,}",
            f"{group.failed:,}",
            _figure(group.ttft_ms, "p50"),
            _figure(group.ttft_ms, "p99"),
            _figure(group.itl_ms, "p50"),
            _figure(group.itl_ms, "p99"),
            _figure(group.tpot_ms, "p50"),
            _figure(group.e2e_ms, "p50"),
            percent(group.cached_token_rate),
        ]
        for run, group in groups
    ]
    return Table(["", *columns], rows, title, "Latencies in ms.")


def turn_chart(results: Sequence[Result]) -> Chart | None:
    """TTFT of each turn of conversations."""
    traces = []
    for index, result in enumerate(results):
        groups = [group for group in result.summary.by_turn if group.ttft_ms.p50 is not None]
        if not groups:
            continue
        medians = [group.ttft_ms.p50 or 0.0 for group in groups]
        lows, highs = zip(
            *(group.ttft_ms.ci.get("p50", (p50, p50)) for group, p50 in zip(groups, medians, strict=True)), strict=True
        )
        traces.append(
            {
                "x": [group.name for group in groups],
                "y": np.round(medians, 3),
                "name": result.label,
                "mode": "lines+markers",
                "line": {"color": series(index), "width": 2},
                "error_y": error_bars(lows, medians, highs),
                "hovertemplate": "%{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    if not traces:
        return None
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": "TTFT p50, ms"}, "rangemode": "tozero"},
        "showlegend": len(traces) > 1,
    }
    return Chart("TTFT of each turn", traces, layout, note="With 95 % confidence intervals.")


def error_table(results: Sequence[Result]) -> Table | None:
    """Number and times of each kind of failure, and the first one's message."""
    rows = []
    for result in results:
        for kind, amount in result.summary.errors.items():
            failed = [request for request in result.requests if request.error == kind]
            detail = next((request.detail for request in failed if request.detail), "")
            counted = result.summary.completed + result.summary.failed
            name = [result.label] if len(results) > 1 else []
            ended = [request.ended_s for request in failed]
            when = f"{min(ended):.1f} s" if len(ended) == 1 else f"{min(ended):.1f} to {max(ended):.1f} s"
            rows.append([kind, *name, f"{amount:,}", percent(amount / counted), when, detail or "-"])
    if not rows:
        return None
    columns = ["failure", *(["run"] if len(results) > 1 else []), "requests", "of all", "when", "first detail"]
    return Table(columns, rows, prose=[len(columns) - 1])


def _phased(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if not request.error and request.e2e_ms is not None]


def _phases_ms(requests: Sequence[Request]) -> list[float]:
    lag = float(np.mean([1e3 * (request.sent_s - request.due_s) for request in requests]))
    ttft = float(np.mean([request.service_ttft_ms or 0.0 for request in requests]))
    rest = float(np.mean([(request.e2e_ms or 0.0) - (request.ttft_ms or 0.0) for request in requests]))
    return [lag, ttft, rest]


def _figure(stat: Stat, name: str) -> Cell:
    return Cell(number(getattr(stat, name)), interval(stat.ci.get(name)))

"""Shows a sweep in a terminal and as a page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from bench.report.curves import latency_axis, spread_wide
from bench.report.page import Card, Cards, Cell, Chart, Facts, Notice, Page, Table, Tone, error_bars, series
from bench.report.terminal import terminal_table
from bench.report.text import interval, number, percent
from bench.result import Result, Stat, Summary
from bench.sweep.result import Point, Sweep

_COLUMNS = ("TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99", "Tokens/s", "Requests/s", "Failed", "Good")


def show(sweep: Sweep, console: Console) -> None:
    """Prints a row for each load, and the answer of a search."""
    console.print(terminal_table(_table(sweep)))
    answer = _answer(sweep)
    if answer:
        console.print(Text(answer, style="bold"))
    for doubt in _doubts(sweep):
        console.print(Text(doubt, style="red"))


def write_html(sweep: Sweep, path: Path) -> None:
    """Writes the sweep as a page.

    Raises:
        BenchError: The file cannot be written.
    """
    first = sweep.points[0].result if sweep.points else None
    page = Page("Sweep", _subtitle(first) if first else "")
    answer = _answer(sweep)
    if answer:
        tone: Tone = "good" if sweep.max_rate else "bad"
        page.add(Notice(tone, answer))
        if sweep.max_rate:
            page.add(Cards([Card("Highest rate", number(sweep.max_rate), "sessions/s", "good")]))
    sound = _sound(sweep)
    if len(sound) < len(sweep.points):
        page.add(Notice("bad", "At some loads the client could not keep up; they are left out", _doubts(sweep)))
    page.add(Facts("Command", [("command", " ".join(sweep.command))]))
    page.add(
        _table(sweep),
        _trade_chart("TTFT against throughput", sound, sweep, lambda summary: summary.ttft_ms),
        _trade_chart("ITL against throughput", sound, sweep, lambda summary: summary.itl_ms),
        _latency_chart("TTFT, ms", [(point.load, point.result.summary.ttft_ms) for point in sound], _load_name(sweep)),
        _latency_chart("ITL, ms", [(point.load, point.result.summary.itl_ms) for point in sound], _load_name(sweep)),
        _throughput_chart(sound, _load_name(sweep)),
    )
    page.write(path)


def _sound(sweep: Sweep) -> list[Point]:
    """The loads at which the client kept up."""
    return [point for point in sweep.points if not point.result.client.limited]


def _table(sweep: Sweep) -> Table:
    rows: list[list[str | Cell]] = [
        [
            _number(point.load),
            *(Cell(text, tone=_tone(point)) for text in _cells(point)),
            Cell(*_good(point), tone=_tone(point)),
        ]
        for point in _sound(sweep)
    ]
    return Table([_load_name(sweep), *_COLUMNS], rows)


def _cells(point: Point) -> list[str]:
    summary = point.result.summary
    return [
        number(summary.ttft_ms.p50),
        number(summary.ttft_ms.p99),
        number(summary.itl_ms.p50),
        number(summary.itl_ms.p99),
        number(summary.output_tokens_per_s),
        number(summary.requests_per_s),
        str(summary.failed),
    ]


def _good(point: Point) -> tuple[str, str]:
    """The share of good requests, and its confidence interval in %."""
    if point.overloaded:
        return "queue grows", ""
    if point.share is None:
        return "-", ""
    ci = point.share_ci
    return percent(point.share), interval((ci[0] * 100, ci[1] * 100)) if ci else ""


def _latency_chart(title: str, stats: Sequence[tuple[float, Stat]], load_name: str) -> Chart:
    """Median and tail over the load, with confidence intervals."""
    traces = []
    for index, name in enumerate(("p50", "p90", "p99")):
        found = [(load, getattr(stat, name), stat.ci.get(name)) for load, stat in stats]
        points = [(load, value, ci or (value, value)) for load, value, ci in found if value is not None]
        values = [value for _, value, _ in points]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [load for load, _, _ in points],
                "y": values,
                "line": {"color": series(index)},
                "error_y": error_bars([ci[0] for *_, ci in points], values, [ci[1] for *_, ci in points]),
            }
        )
    wide = spread_wide([np.array(trace["y"]) for trace in traces])
    axes = {"xaxis": {"title": {"text": load_name}, "rangemode": "tozero"}, "yaxis": latency_axis(wide)}
    return Chart(title, traces, axes)


def _trade_chart(title: str, points: Sequence[Point], sweep: Sweep, stat: Callable[[Summary], Stat]) -> Chart:
    """A latency over throughput: how much more waiting a higher load costs."""
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [point.result.summary.output_tokens_per_s for point in points],
            "y": [getattr(stat(point.result.summary), name) for point in points],
            "text": [f"{_load_name(sweep)}: {_number(point.load)}" for point in points],
            "hovertemplate": "%{y:,.4~g} ms at %{x:,.4~g} tokens/s<br>%{text}<extra>%{fullData.name}</extra>",
            "line": {"color": series(index)},
        }
        for index, name in enumerate(("p50", "p99"))
    ]
    values = [np.array([y for y in trace["y"] if y is not None], dtype=float) for trace in traces]
    axes = {
        "xaxis": {"title": {"text": "output tokens/s"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "ms"}, **latency_axis(spread_wide(values))},
        "hovermode": "closest",
    }
    return Chart(title, traces, axes, note="One point for each load.")


def _throughput_chart(points: Sequence[Point], load_name: str) -> Chart:
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.load for point in points],
        "y": [point.result.summary.output_tokens_per_s for point in points],
        "line": {"color": series(0)},
    }
    axes = {"xaxis": {"title": {"text": load_name}, "rangemode": "tozero"}, "yaxis": {"rangemode": "tozero"}}
    return Chart("Output tokens/s", [trace], axes)


def _subtitle(first: Result) -> str:
    """Model, workload, URL and date, as on the page of a run."""
    settings = first.settings
    parts = [first.label.rsplit(" ", 2)[0], f"{settings.get('workload', '')} workload", str(settings.get("url", ""))]
    return " · ".join(part for part in [*parts, first.started_at] if part)


def _doubts(sweep: Sweep) -> list[str]:
    """The loads at which the client could not keep up, and why."""
    return [
        f"{_number(point.load)}: the client could not keep up: {'; '.join(point.result.client.reasons)}"
        for point in sweep.points
        if point.result.client.reasons
    ]


def _answer(sweep: Sweep) -> str:
    """The result of a search in a sentence; empty for a plain sweep."""
    if not sweep.settings.get("find_max_rate") or sweep.interrupted:
        return ""
    target = f"{percent(sweep.settings['slo_share'])} of the requests within {sweep.settings['slo']}"
    limited = [point.load for point in sweep.points if point.result.client.limited]
    ended = f" The search ended at {number(min(limited))}: the client could not keep up." if limited else ""
    if sweep.max_rate is None and limited:
        return f"No rate was found.{ended}"
    if sweep.max_rate is None:
        tried = f" (tried down to {number(sweep.too_much)})" if sweep.too_much else ""
        return f"No rate keeps {target}{tried}."
    failed = f"; {number(sweep.too_much)} is too much" if sweep.too_much else ""
    return f"Up to {number(sweep.max_rate)} sessions/s, {target}{failed}.{ended}"


def _load_name(sweep: Sweep) -> str:
    return "Streams" if sweep.settings.get("concurrencies") else "Sessions/s"


def _number(load: float) -> str:
    return f"{load:g}" if load == int(load) else number(load)


def _tone(point: Point) -> Tone:
    return "" if point.met is None else "good" if point.met else "bad"

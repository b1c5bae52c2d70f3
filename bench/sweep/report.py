"""A sweep in the terminal and as a page."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from bench.report.page import Card, Cards, Cell, Chart, Facts, Notice, Page, Table, Tone, series
from bench.report.text import interval, number, percent
from bench.result import Stat
from bench.sweep.result import Point, Sweep

_COLUMNS = ("TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99", "Tokens/s", "Requests/s", "Failed", "Good")


def show(sweep: Sweep, console: Console) -> None:
    """Prints a row a point, and the answer of a search."""
    table = TerminalTable(_load_name(sweep), *_COLUMNS, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for point in sweep.points:
        if point.result.client.limited:
            table.add_row(_number(point.load), Text("the client could not keep up", style="red"))
        else:
            cells = [Text(text, style="red" if point.kept is False else "") for text in _cells(point)]
            table.add_row(_number(point.load), *cells)
    console.print(table)
    for point in sweep.points:
        for reason in point.result.client.reasons:
            console.print(Text(f"{_number(point.load)}: {reason}", style="red"))
    answer = _answer(sweep)
    if answer:
        console.print(Text(answer, style="bold"))


def write_html(sweep: Sweep, path: Path) -> None:
    """Writes the sweep as a page.

    Raises:
        BenchError: The file cannot be written.
    """
    first = sweep.points[0].result if sweep.points else None
    page = Page("Sweep", first.label.rsplit(" ", 2)[0] if first else "")
    page.add(Facts("Command", [("command", " ".join(sweep.command))]))
    answer = _answer(sweep)
    if answer:
        tone: Tone = "good" if sweep.max_rate else "bad"
        page.add(Notice(tone, answer))
        if sweep.max_rate:
            page.add(Cards([Card("Highest rate", number(sweep.max_rate), "sessions/s", "good")]))
    sound = [point for point in sweep.points if not point.result.client.limited]
    if len(sound) < len(sweep.points):
        page.add(Notice("bad", "At some loads the client could not keep up; they are left out"))
    rows: list[list[str | Cell]] = [
        [_number(point.load), *(Cell(text, tone=_tone(point)) for text in _cells(point))] for point in sound
    ]
    page.add(Table([_load_name(sweep), *_COLUMNS], rows))
    page.add(
        _latency_chart("TTFT, ms", [(point.load, point.result.summary.ttft_ms) for point in sound], _load_name(sweep)),
        _latency_chart("ITL, ms", [(point.load, point.result.summary.itl_ms) for point in sound], _load_name(sweep)),
        _throughput_chart(sound, _load_name(sweep)),
    )
    page.write(path)


def _cells(point: Point) -> list[str]:
    summary = point.result.summary
    good = percent(point.share) if point.share is not None else "-"
    if point.share_ci and point.share is not None:
        good += f" ({interval((point.share_ci[0] * 100, point.share_ci[1] * 100))})"
    if point.overloaded:
        good = "queue grows"
    return [
        number(summary.ttft_ms.p50),
        number(summary.ttft_ms.p99),
        number(summary.itl_ms.p50),
        number(summary.itl_ms.p99),
        number(summary.output_tokens_per_s),
        number(summary.requests_per_s),
        str(summary.failed),
        good,
    ]


def _latency_chart(title: str, stats: Sequence[tuple[float, Stat]], load_name: str) -> Chart:
    """Median and tail over the load, with their intervals."""
    traces = []
    for index, name in enumerate(("p50", "p90", "p99")):
        points = [(load, getattr(stat, name), stat.ci.get(name)) for load, stat in stats]
        points = [point for point in points if point[1] is not None]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [load for load, _, _ in points],
                "y": [value for _, value, _ in points],
                "line": {"color": series(index)},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [ci[1] - value if ci else 0 for _, value, ci in points],
                    "arrayminus": [value - ci[0] if ci else 0 for _, value, ci in points],
                },
            }
        )
    return Chart(title, traces, {"xaxis": {"title": {"text": load_name}}, "yaxis": {"type": "log"}})


def _throughput_chart(points: Sequence[Point], load_name: str) -> Chart:
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.load for point in points],
        "y": [point.result.summary.output_tokens_per_s for point in points],
        "line": {"color": series(0)},
    }
    return Chart("Output tokens/s", [trace], {"xaxis": {"title": {"text": load_name}}})


def _answer(sweep: Sweep) -> str:
    """What a search found, in a sentence; empty for a plain sweep."""
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
    return "" if point.kept is None else "good" if point.kept else "bad"

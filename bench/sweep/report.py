"""Shows a sweep in a terminal and as a page."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bench.report.page import Card, Cards, Cell, Chart, Facts, Notice, Page, Table, Tone, error_bars, series
from bench.report.terminal import terminal_table
from bench.report.text import interval, number, percent
from bench.result import Stat
from bench.sweep.result import Point, Sweep

_COLUMNS = ("TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99", "Tokens/s", "Requests/s", "Failed", "Good")


def show(sweep: Sweep, console: Console) -> None:
    """Prints a row for each load, and the answer of a search."""
    console.print(terminal_table(_table(sweep)))
    for point in sweep.points:
        if reasons := point.result.client.reasons:
            text = f"{_number(point.load)}: the client could not keep up: {'; '.join(reasons)}"
            console.print(Text(text, style="red"))
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
    sound = _sound(sweep)
    if len(sound) < len(sweep.points):
        page.add(Notice("bad", "At some loads the client could not keep up; they are left out"))
    page.add(
        _table(sweep),
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
        [_number(point.load), *(Cell(text, tone=_tone(point)) for text in _cells(point))] for point in _sound(sweep)
    ]
    return Table([_load_name(sweep), *_COLUMNS], rows)


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

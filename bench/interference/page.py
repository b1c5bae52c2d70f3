"""Shows a study as a page."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.interference.result import Cell, InterferenceResult, Spread
from bench.interference.verdicts import tone_of
from bench.report import page as parts
from bench.report.curves import LOG_AXIS
from bench.report.page import Card, Chart, Notice, Page, error_bars, series
from bench.report.text import interval, milliseconds, number

_LEAD = (
    "Mean gap between the chunks of all decode streams from the burst to the last first token of its prompts, compared "
    "with the same streams just before."
)
_TOKENS_AXIS = {**LOG_AXIS, "title": {"text": "prompt tokens of the burst"}}
_TIMELINES = 4


def write_page(result: InterferenceResult, path: Path) -> None:
    """Writes the study as one self-contained HTML file. If the client limited it, writes only the reasons.

    Raises:
        BenchError: The file cannot be written.
    """
    page = Page("Interference of prefill with decode", result.label)
    if result.client.limited:
        page.add(Notice("bad", "The client could not keep up: the figures would be its own", result.client.reasons))
    else:
        _add_figures(page, result)
    page.section("About")
    about = {"command": " ".join(result.command), "started": result.started_at, "seed": result.seed}
    about |= result.versions | result.settings
    page.add(parts.Facts("Command, versions and settings", [(name, str(value)) for name, value in about.items()]))
    page.write(path)


def _add_figures(page: Page, result: InterferenceResult) -> None:
    if result.interrupted:
        page.add(Notice("warn", "The study was interrupted: these are the bursts until then"))
    if result.error:
        page.add(Notice("bad", "The study ended early", [result.error]))
    for verdict in result.verdicts:
        page.add(Notice(verdict.tone, verdict.text))
    errors = [f"{cell.name}: {cell.error}" for cell in result.cells if cell.error]
    if errors:
        page.add(Notice("bad", "Some bursts could not be measured", errors))
    cells = [cell for cell in result.cells if cell.bursts]
    if not cells:
        return
    page.add(_cards(cells))
    page.section("Effect of a burst on decoding", _LEAD)
    page.add(
        _heat("Increase of the mean ITL, %", cells, "increase_percent", "+,.0f"),
        _heat("Longest gap of any stream, ms", cells, "longest_gap_ms", ",.3~g"),
        _increase_by_tokens(cells),
        _over_time(cells),
    )
    page.section("Effect of decoding on a burst", "Time to first token of the injected prompts.")
    page.add(_ttft(cells))
    page.section("All figures")
    page.add(burst_table(cells))


def _cards(cells: Sequence[Cell]) -> parts.Cards:
    percent, worst = max((_median(cell.increase_percent), cell.name) for cell in cells)
    longest, stalled = max((_median(cell.longest_gap_ms), cell.name) for cell in cells)
    before = median(_median(cell.before_ms) for cell in cells)
    return parts.Cards(
        [
            Card("ITL without a burst", milliseconds(before), "mean, median of all bursts"),
            Card("Largest increase", f"{percent:+,.0f} %", f"burst of {worst}", tone_of(percent)),
            Card("Longest gap", milliseconds(longest), f"burst of {stalled}"),
        ]
    )


def _heat(title: str, cells: Sequence[Cell], figure: str, form: str) -> Chart:
    """A heat map of one figure by the number and length of prompts."""
    counts = sorted({cell.prefills for cell in cells})
    lengths = sorted({cell.prefill_len for cell in cells})
    medians = {(cell.prefills, cell.prefill_len): _median(getattr(cell, figure)) for cell in cells}
    trace = {
        "type": "heatmap",
        "x": [f"{count} x" for count in counts],
        "y": [f"{length:,}" for length in lengths],
        "z": [[medians.get((count, length)) for count in counts] for length in lengths],
        "colorscale": "$heat",
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "texttemplate": f"%{{z:{form}}}",
        "hovertemplate": f"%{{x}} %{{y}} tokens: %{{z:{form}}}<extra></extra>",
    }
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": "prompts"}, "showgrid": False},
        "yaxis": {"type": "category", "title": {"text": "tokens of each"}, "showgrid": False},
        "hovermode": "closest",
    }
    return Chart(title, [trace], layout, height=320)


def _increase_by_tokens(cells: Sequence[Cell]) -> Chart:
    traces = []
    for index, count in enumerate(sorted({cell.prefills for cell in cells})):
        row = [cell for cell in cells if cell.prefills == count]
        spreads = [cell.increase_percent for cell in row if cell.increase_percent]
        traces.append(
            {
                "x": [cell.tokens for cell in row],
                "y": [spread.median for spread in spreads],
                "error_y": error_bars(
                    *([getattr(spread, name) for spread in spreads] for name in ("low", "median", "high"))
                ),
                "mode": "lines+markers",
                "name": f"{count} x",
                "line": {"color": series(index), "width": 2},
                "hovertemplate": "%{x:,} tokens: %{y:+,.0f} %<extra>%{fullData.name}</extra>",
            }
        )
    layout = {"xaxis": _TOKENS_AXIS, "yaxis": {"title": {"text": "increase, %"}}, "hovermode": "closest"}
    return Chart("Increase of the mean ITL by size of the burst", traces, layout, "Bars: range over the bursts.", 320)


def _over_time(cells: Sequence[Cell]) -> Chart:
    """The last burst of the kinds with the largest increase."""
    shown = sorted(cells, key=lambda cell: _median(cell.increase_percent), reverse=True)[:_TIMELINES]
    traces = [
        {
            "x": [at_ms / 1e3 for at_ms, _ in cell.bursts[-1].timeline],
            "y": [gap_ms for _, gap_ms in cell.bursts[-1].timeline],
            "mode": "lines",
            "name": cell.name,
            "line": {"color": series(index), "width": 2, "shape": "hvh"},
            "hovertemplate": "%{y:,.3~g} ms<extra>%{fullData.name}</extra>",
        }
        for index, cell in enumerate(shown)
    ]
    layout = {
        "xaxis": {"title": {"text": "time since the burst, s"}},
        "yaxis": {"title": {"text": "mean gap, ms"}, "rangemode": "tozero"},
    }
    return Chart("ITL around a burst", traces, layout, "One burst of each of the kinds with the largest increase.", 320)


def _ttft(cells: Sequence[Cell]) -> Chart:
    traces = [
        {
            "x": [cell.tokens for cell in cells],
            "y": [_median(getattr(cell, figure)) for cell in cells],
            "customdata": [cell.name for cell in cells],
            "mode": "markers",
            "name": name,
            "marker": {"color": series(index), "size": 8, "opacity": 0.8},
            "hovertemplate": "%{customdata}: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
        }
        for index, (figure, name) in enumerate((("ttft_ms", "beside decode"), ("idle_ttft_ms", "idle server")))
    ]
    axis = {**LOG_AXIS, "title": {"text": "TTFT, ms"}}
    layout = {"xaxis": _TOKENS_AXIS, "yaxis": axis, "hovermode": "closest"}
    return Chart("Median TTFT of the injected prompts", traces, layout, height=320, wide=True)


def burst_table(cells: Sequence[Cell]) -> parts.Table:
    """A row for each kind of burst."""
    columns = "burst", "tokens", "ITL before", "ITL during", "increase", "longest gap", "TTFT", "TTFT idle", "recovery"
    rows: list[list[str | parts.Cell]] = []
    for cell in cells:
        percent = _median(cell.increase_percent)
        rows.append(
            [
                cell.name,
                f"{cell.tokens:,}",
                _cell(cell.before_ms),
                _cell(cell.during_ms),
                parts.Cell(f"{percent:+,.0f} %", tone=tone_of(percent)),
                _cell(cell.longest_gap_ms),
                _cell(cell.ttft_ms),
                _cell(cell.idle_ttft_ms),
                _cell(cell.recovery_s) if cell.recovery_s else parts.Cell("never", tone="bad"),
            ]
        )
    note = "ITL, gaps and TTFT in ms, recovery in s: median (and range) over the bursts of a kind."
    return parts.Table(columns, rows, note=note)


def _cell(spread: Spread | None) -> parts.Cell:
    if spread is None:
        return parts.Cell(number(None))
    return parts.Cell(number(spread.median), interval((spread.low, spread.high)))


def _median(spread: Spread | None) -> float:
    """The median, which exists in a cell with bursts."""
    return spread.median if spread else 0.0

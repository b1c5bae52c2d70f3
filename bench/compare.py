"""`cpd bench compare`: several runs against the first of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.errors import BenchError
from bench.report.comparison import Figure, differences, figures
from bench.report.head import troubles
from bench.report.html import write_html
from bench.report.text import interval, number
from bench.result import Result


def compare(paths: Sequence[Path], html: Path | None, console: Console) -> None:
    """Prints the figures of runs side by side, with their ratios to the first run's and whether they could be chance.

    Args:
        paths: Result files of `cpd bench run --json`.
        html: Where to write the same with charts; None doesn't.
        console: Where to print.

    Raises:
        BenchError: There are fewer than two files, one cannot be read, or the client limited one of the runs.
    """
    if len(paths) < 2:
        raise BenchError("a comparison needs at least two result files of `cpd bench run --json`")
    results = [Result.load(path) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if result.client.limited:
            reasons = "; ".join(result.client.reasons)
            raise BenchError(f"{path} has no figures of a server, since its client could not keep up: {reasons}")
    results = _named(results, paths)
    show_comparison(results, console)
    if html:
        write_html(results, html)


def show_comparison(results: Sequence[Result], console: Console) -> None:
    """Prints what differs in the settings, what the runs suffered from, then the figures."""
    changed = differences(results)
    if changed:
        table = _table("Settings that differ", *(result.label for result in results))
        for difference in changed:
            style = "" if difference.same_load else "yellow"
            table.add_row(Text(difference.name, style=style), *(Text(value) for value in difference.values))
        console.print(table)
    if not all(difference.same_load for difference in changed):
        console.print(Text("The runs were asked for different loads: their ratios say little.", style="yellow"))
    for result in results:
        for trouble in troubles(result):
            console.print(Text(f"{result.label}: {trouble}", style="yellow"))
    first, *others = (result.label for result in results)
    table = _table("Figure", first, *(column for name in others for column in (name, "ratio")))
    for figure in figures(results):
        cells = [_value(figure, 0)]
        for run in range(1, len(results)):
            cells += [_value(figure, run), _ratio(figure, run)]
        table.add_row(Text(figure.name), *cells)
    console.print(table)
    console.print(
        Text(f"Ratios are to {first}. Where the 95 % intervals overlap, the difference may be chance.", style="dim")
    )


def _named(results: Sequence[Result], paths: Sequence[Path]) -> list[Result]:
    """The results, each with a label of its own: that of its file where labels are the same."""
    labels = Counter(result.label for result in results)
    names = [
        path.stem if labels[result.label] > 1 else result.label for path, result in zip(paths, results, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [result.model_copy(update={"label": name}) for result, name in zip(results, names, strict=True)]


def _table(*columns: str) -> Table:
    table = Table(columns[0], box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _value(figure: Figure, run: int) -> Text:
    text = Text(number(figure.values[run]))
    if ci := figure.intervals[run]:
        text.append(f"\n{interval(ci)}", style="dim")
    return text


def _ratio(figure: Figure, run: int) -> Text:
    ratio, overlap, better = figure.ratio(run), figure.overlap(run), figure.better(run)
    if ratio is None:
        return Text("-")
    text = Text(f"{number(ratio)}x", style="" if better is None else "green" if better else "red")
    if overlap is not None:
        text.append("\noverlap" if overlap else "\napart", style="dim")
    return text

"""`cpd bench compare`: compares several runs with the first of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bench.errors import BenchError
from bench.report.comparison import differences, figures
from bench.report.head import comparison_table, difference_table, troubles
from bench.report.html import write_html
from bench.report.terminal import terminal_table
from bench.result import Result


def compare(paths: Sequence[Path], html: Path | None, console: Console) -> None:
    """Prints the figures of runs side by side, with their ratios to the first run.

    Args:
        paths: Result files of `cpd bench run --json`.
        html: File for a page with charts; None writes none.
        console: Where to print.

    Raises:
        BenchError: There are fewer than two files, a file cannot be read, or the client limited a run.
    """
    if len(paths) < 2:
        raise BenchError("a comparison needs at least two result files of `cpd bench run --json`")
    results = [Result.load(path) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if result.client.limited:
            reasons = "; ".join(result.client.reasons)
            raise BenchError(f"{path} has no figures of a server, since its client could not keep up: {reasons}")
    results = _with_distinct_labels(results, paths)
    show_comparison(results, console)
    if html:
        write_html(results, html)


def show_comparison(results: Sequence[Result], console: Console) -> None:
    """Prints the settings that differ, warnings about the runs, and the figures."""
    changed = differences(results)
    if table := difference_table(changed, results):
        console.print(terminal_table(table))
    if not all(difference.same_load for difference in changed):
        console.print(Text("The runs have different loads: their ratios say little.", style="yellow"))
    for result in results:
        for trouble in troubles(result):
            console.print(Text(f"{result.label}: {trouble}", style="yellow"))
    console.print(terminal_table(comparison_table(figures(results), results)))


def _with_distinct_labels(results: Sequence[Result], paths: Sequence[Path]) -> list[Result]:
    """Labels results by their files where labels are equal."""
    labels = Counter(result.label for result in results)
    names = [
        path.stem if labels[result.label] > 1 else result.label for path, result in zip(paths, results, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [result.model_copy(update={"label": name}) for result, name in zip(results, names, strict=True)]

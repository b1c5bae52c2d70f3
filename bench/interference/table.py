"""A study in a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bench.interference.result import Cell, InterferenceResult, Spread, Tone
from bench.interference.verdicts import tone_of
from bench.report.text import number

_STYLES: dict[Tone, str] = {"good": "green", "warn": "yellow", "bad": "red"}
_REMEDY = (
    "So the figures would be the client's, not the server's, and are not shown. Run the client where no server takes "
    "its cores, or with fewer --decodes."
)


def show(result: InterferenceResult, console: Console) -> None:
    """Prints the study; of one that the client limited only the reasons, since its figures would mislead."""
    if result.client.limited:
        lines = [*(f"- {reason}" for reason in result.client.reasons), _REMEDY]
        console.print(Panel(Text("\n".join(lines)), title="The client could not keep up", style="red"))
        return
    console.print(Text(result.label, style="bold"))
    measured = [cell for cell in result.cells if cell.bursts]
    if measured:
        for part in (_bursts(measured), _grid(measured)):
            console.print(part)
            console.print()
    if result.error:
        console.print(Text(f"- the study ended early: {result.error}", style="red"))
    for cell in result.cells:
        if cell.error:
            console.print(Text(f"- {cell.name}: {cell.error}", style="red"))
    for verdict in result.verdicts:
        console.print(Text(f"- {verdict.text}", style=_STYLES[verdict.tone]))


def _bursts(cells: Sequence[Cell]) -> Table:
    table = _table("burst", "ITL before", "during", "increase", "longest", "TTFT", "idle", "recovery")
    table.caption = (
        "ITL before and during a burst, and the longest gap; TTFT beside decoding and on the idle server: in ms.\n"
        "Recovery in s. Medians over the bursts of a kind."
    )
    for cell in cells:
        table.add_row(
            cell.name,
            _median(cell.before_ms),
            _median(cell.during_ms),
            _increase(cell),
            _median(cell.longest_gap_ms),
            _median(cell.ttft_ms),
            _median(cell.idle_ttft_ms),
            _median(cell.recovery_s) if cell.recovery_s else Text("never", style="red"),
        )
    return table


def _grid(cells: Sequence[Cell]) -> Table:
    counts = sorted({cell.prefills for cell in cells})
    by_kind = {(cell.prefills, cell.prefill_len): cell for cell in cells}
    table = _table("tokens", *(f"{count} x" for count in counts))
    table.caption = "Increase of the mean ITL during a burst."
    for length in sorted({cell.prefill_len for cell in cells}):
        table.add_row(f"{length:,}", *(_increase(by_kind.get((count, length))) for count in counts))
    return table


def _increase(cell: Cell | None) -> Text:
    if cell is None or cell.increase_percent is None:
        return Text(number(None))
    percent = cell.increase_percent.median
    return Text(f"{percent:+,.0f} %", style=_STYLES[tone_of(percent)])


def _median(spread: Spread | None) -> str:
    return number(spread.median if spread else None)


def _table(name: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, caption_justify="left")
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table

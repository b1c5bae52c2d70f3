"""Shows a study in a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.interference.page import burst_table
from bench.interference.result import Cell, InterferenceResult
from bench.interference.verdicts import tone_of
from bench.report.terminal import STYLES, empty_table, limited_panel, terminal_table
from bench.report.text import number

_REMEDY = (
    "The figures would be the client's, not the server's, and are not shown. Run the client on cores that no server "
    "uses, or with fewer --decodes."
)


def show(result: InterferenceResult, console: Console) -> None:
    """Prints the study. If the client limited it, prints only the reasons: its figures would mislead."""
    if result.client.limited:
        console.print(limited_panel(result.client.reasons, _REMEDY))
        return
    console.print(Text(result.label, style="bold"))
    measured = [cell for cell in result.cells if cell.bursts]
    if measured:
        for part in (terminal_table(burst_table(measured), notes=False), _grid(measured)):
            console.print(part)
            console.print()
    if result.error:
        console.print(Text(f"- the study ended early: {result.error}", style="red"))
    for cell in result.cells:
        if cell.error:
            console.print(Text(f"- {cell.name}: {cell.error}", style="red"))
    for verdict in result.verdicts:
        console.print(Text(f"- {verdict.text}", style=STYLES[verdict.tone]))


def _grid(cells: Sequence[Cell]) -> Table:
    counts = sorted({cell.prefills for cell in cells})
    by_kind = {(cell.prefills, cell.prefill_len): cell for cell in cells}
    table = empty_table("tokens", *(f"{count} x" for count in counts))
    table.caption = "Increase of the mean ITL during a burst."
    for length in sorted({cell.prefill_len for cell in cells}):
        table.add_row(f"{length:,}", *(_increase(by_kind.get((count, length))) for count in counts))
    return table


def _increase(cell: Cell | None) -> Text:
    if cell is None or cell.increase_percent is None:
        return Text(number(None))
    percent = cell.increase_percent.median
    return Text(f"{percent:+,.0f} %", style=STYLES[tone_of(percent)])

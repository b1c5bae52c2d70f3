"""Parts of a report in a terminal."""

from collections.abc import Sequence

from rich import box
from rich.panel import Panel
from rich.table import Table as TerminalTable
from rich.text import Text

from bench.report.page import Cell, Table, Tone

STYLES: dict[Tone, str] = {"": "", "good": "green", "warn": "yellow", "bad": "red"}


def empty_table(name: str, *columns: str) -> TerminalTable:
    """A table without rows: a column for the names of rows, then columns of numbers."""
    table = TerminalTable(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, pad_edge=False)
    table.caption_justify = "left"
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def terminal_table(source: Table, *, notes: bool = True) -> TerminalTable:
    """A page's table for a terminal, with each word of a numeric column's heading on its own line.

    Args:
        source: The table.
        notes: Show the notes below the cells.
    """
    name, *columns = source.columns
    table = empty_table(name or source.title, *(column.replace(" ", "\n") for column in columns))
    table.caption = Text(source.note)
    for column in table.columns[1:]:
        column.no_wrap = False
    for index in source.prose:
        table.columns[index].header = source.columns[index]
        table.columns[index].justify, table.columns[index].overflow = "left", "fold"
    for row in source.cells():
        table.add_row(*(_text(cell, notes=notes) for cell in row))
    return table


def limited_panel(reasons: Sequence[str], remedy: str) -> Panel:
    """Replaces the figures if the client could not keep up."""
    lines = [*(f"- {reason}" for reason in reasons), remedy]
    return Panel(Text("\n".join(lines)), title="The client could not keep up", style="red")


def _text(cell: Cell, *, notes: bool) -> Text:
    text = Text(cell.text, style=STYLES[cell.tone])
    if cell.note and notes:
        text.append(f"\n{cell.note}", style="dim")
    return text

import io

from rich.console import Console, RenderableType

from bench.report.page import Cell, Table
from bench.report.terminal import limited_panel, terminal_table


def shown(part: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


TABLE = Table(["", "TTFT p50", "detail"], [["a", Cell("12.5", "11-14"), "[red]x[/red]"]], "Runs", "In ms.", prose=[2])


def test_a_table_has_its_title_headings_cells_and_note() -> None:
    lines = [line.split() for line in shown(terminal_table(TABLE)).splitlines()]
    assert ["Runs", "p50", "detail"] in lines
    assert ["a", "12.5", "[red]x[/red]"] in lines
    assert ["11-14"] in lines
    assert ["In", "ms."] in lines


def test_notes_of_cells_can_be_left_out() -> None:
    assert "11-14" not in shown(terminal_table(TABLE, notes=False))


def test_a_panel_lists_reasons_and_the_remedy() -> None:
    text = shown(limited_panel(["too slow", "too late"], "Use more cores."))
    assert all(part in text for part in ("could not keep up", "- too slow", "- too late", "Use more cores."))

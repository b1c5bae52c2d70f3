from pathlib import Path

from rich.console import Console

from cpd.cli.transfer import page, show
from kvtransfer.bench.result import Cell, Push, TransferResult

PUSHES = (Push(ms=2.0, sender_cpu_ms=1.0, receiver_cpu_ms=0.5), Push(ms=4.0, sender_cpu_ms=1.0, receiver_cpu_ms=0.5))


def result(*ceilings: float) -> TransferResult:
    cells = [
        Cell(page_bytes=16 << 10, pages=pages, scattered=scattered, pushes=PUSHES, ceilings=ceilings)
        for pages in (1, 32)
        for scattered in (True, False)
    ]
    return TransferResult(
        schema="cpd-bench-transfer/1",
        transport="nixl",
        route="memory",
        machine="a machine",
        ceiling="what ran",
        cells=tuple(cells),
    )


def shown(what: TransferResult) -> str:
    console = Console(record=True, width=80)
    show(what, console)
    return console.export_text()


def test_the_table_has_a_ceiling_only_if_it_was_measured() -> None:
    assert "share" in shown(result(1e9, 2e9)).splitlines()[2]
    assert "share" not in shown(result()).splitlines()[2]
    assert "what ran" in shown(result())


def test_the_page_draws_a_line_for_every_page_size_and_layout(tmp_path: Path) -> None:
    path = tmp_path / "transfer.html"
    page(result(1e9)).write(path)
    text = path.read_text()
    assert all(name in text for name in ("16 KiB, contiguous", "ucx_perftest", "a machine"))

"""`cpd bench transfer`: how fast pages move between two processes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cpd.common.errors import ConfigError
from cpd.common.process import switch_threads_often
from kvtransfer.bench.settings import TransferBenchSettings

if TYPE_CHECKING:
    from rich.console import Console

    from bench.report.page import Chart, Page
    from kvtransfer.bench.result import Cell, TransferResult


_NOTE = (
    "ms and GB/s of the median push, GB/s of the best; CPU µs per page of the sender (out) and the receiver (in), the "
    "least of all pushes; share of the ceiling: median of its median, best of its best."
)


def bench_transfer(settings: TransferBenchSettings) -> None:
    """Measure how fast a transport moves pages between two processes, of this host or of two.

    On another host, `--listen` starts the receiver that `--connect` needs. ucx_perftest, if it is installed, runs
    between the pushes as their ceiling.
    """
    import asyncio

    from rich.console import Console

    from kvtransfer.bench import receiver

    switch_threads_often()
    if settings.listen:
        host, _, port = settings.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"listen: {settings.listen!r} is not HOST:PORT")
        asyncio.run(receiver.serve(host.strip("[]"), int(port)))
        return
    result = _measure(settings)
    show(result, Console())
    if settings.json_file is not None:
        _write(settings.json_file, result.model_dump_json(indent=2, by_alias=True) + "\n")
    if settings.html_file is not None:
        page(result).write(settings.html_file)
    if settings.profile is not None:
        from cpd.performance.model import Profile, TransferProfile

        cost = result.cost()
        transfer = TransferProfile(fixed_ms=cost.fixed_ms, bytes_per_ms=cost.bytes_per_ms)
        Profile.load(settings.profile).model_copy(update={"transfer": transfer}).save(settings.profile)


def _measure(settings: TransferBenchSettings) -> "TransferResult":
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from kvtransfer.bench.measure import measure

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("pushes", total=1.0)

        def on_progress(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)

        return asyncio.run(measure(settings, on_progress))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def show(result: "TransferResult", console: "Console") -> None:
    """Prints the figures as a table."""
    from rich import box
    from rich.table import Table

    console.print(f"{result.transport}, {result.route}; {result.machine}")
    table = Table(*_columns(result), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for cell in result.cells:
        table.add_row(*_row(cell))
    console.print(table)
    console.print(f"Ceiling: {result.ceiling}\n{_NOTE}")
    cost = result.cost()
    console.print(f"Cost of a transfer: {cost.fixed_ms:.2f} ms plus 1 s per {cost.bytes_per_ms / 1e6:.2f} GB.")


def _columns(result: "TransferResult") -> list[str]:
    columns = ["KiB", "pages", "layout", "ms", "GB/s", "best", "out", "in"]
    return columns + (["ceiling", "share", "best"] if any(cell.ceilings for cell in result.cells) else [])


def _row(cell: "Cell") -> list[str]:
    sender_us, receiver_us = cell.cpu_us_per_page
    row = [
        f"{cell.page_bytes / (1 << 10):g}",
        f"{cell.pages:,}",
        "scattered" if cell.scattered else "contiguous",
        f"{cell.median_ms:.2f}",
        f"{cell.bytes_per_s / 1e9:.2f}",
        f"{cell.best_bytes_per_s / 1e9:.2f}",
        f"{sender_us:.1f}",
        f"{receiver_us:.1f}",
    ]
    if cell.median_share is not None and cell.best_share is not None:
        row += [f"{max(cell.ceilings) / 1e9:.2f}", f"{cell.median_share:.0%}", f"{cell.best_share:.0%}"]
    return row


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 10):g} KiB"


def page(result: "TransferResult") -> "Page":
    """Makes an HTML page with charts of the figures."""
    from bench.report.page import Facts, Page, Table

    made = Page("KV transfer", f"{result.transport}, {result.route}")
    made.add(
        _chart("Bandwidth, GB/s", result, lambda cell: cell.bytes_per_s / 1e9, ceiling=True),
        _chart("Push time, ms", result, lambda cell: cell.median_ms),
    )
    made.section("All figures", _NOTE)
    columns = _columns(result)
    rows = [_row(cell) for cell in result.cells]
    made.add(Table(columns, [row + ["-"] * (len(columns) - len(row)) for row in rows], prose=[2]))
    made.add(Facts("What ran", [("machine", result.machine), ("ceiling", result.ceiling)]))
    return made


def _chart(
    title: str, result: "TransferResult", figure: Callable[["Cell"], float], *, ceiling: bool = False
) -> "Chart":
    from bench.report.page import Chart, series

    kinds = sorted({(cell.page_bytes, cell.scattered) for cell in result.cells})
    traces = []
    for index, (page_bytes, scattered) in enumerate(kinds):
        cells = [cell for cell in result.cells if (cell.page_bytes, cell.scattered) == (page_bytes, scattered)]
        name = f"{_size(page_bytes)}{'' if scattered else ', contiguous'}"
        traces.append(
            {
                "x": [cell.pages for cell in cells],
                "y": [round(figure(cell), 4) for cell in cells],
                "name": name,
                "mode": "lines+markers",
                "line": {"color": series(index), "width": 2},
                "hovertemplate": "%{x:,} pages: %{y:,.3~g}<extra>%{fullData.name}</extra>",
            }
        )
    best = max((max(cell.ceilings) for cell in result.cells if cell.ceilings), default=None)
    counts = [cell.pages for cell in result.cells]
    if ceiling and best is not None:
        traces.append(
            {
                "x": [min(counts), max(counts)],
                "y": [best / 1e9] * 2,
                "name": "ucx_perftest",
                "mode": "lines",
                "line": {"color": "$muted", "width": 1, "dash": "dash"},
                "hoverinfo": "skip",
            }
        )
    layout = {
        "xaxis": {"type": "log", "title": {"text": "pages per push"}},
        "yaxis": {"type": "log", "title": {"text": title}},
        "hovermode": "closest",
    }
    return Chart(title, traces, layout, "Median pushes. Dashed: the best run of ucx_perftest." if ceiling else "", 340)

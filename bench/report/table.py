"""The result of a run in a terminal."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bench.record import Failure
from bench.report.text import number, percent
from bench.result import Client, Group, Result, Stat, Summary

_COLUMNS = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9"}
_REMEDY = (
    "So the figures would be the client's, not the server's, and are not shown. Run the client where no server takes "
    "its cores, with more cores and --processes, or with less --concurrency or --rate."
)


def show(result: Result, console: Console) -> None:
    """Prints `result`; of a run that the client limited only the reasons, since its figures would mislead."""
    if result.client.limited:
        lines = [*(f"- {reason}" for reason in result.client.reasons), _REMEDY]
        console.print(Panel(Text("\n".join(lines)), title="The client could not keep up", style="red"))
        return
    summary = result.summary
    parts: list[RenderableType] = [_outcome(result), _latencies(summary), _facts(result)]
    for name, groups in (("Turn", summary.by_turn), ("Route", summary.by_route)):
        if groups:
            parts.append(_groups(name, groups))
    if summary.errors:
        parts.append(_errors(result))
    parts += [Text(f"Warning: {warning}.", style="yellow") for warning in result.client.warnings]
    for part in parts:
        console.print(part)
        console.print()


def _outcome(result: Result) -> Text:
    summary = result.summary
    text = Text(f"{result.label}: {summary.completed} completed", style="bold")
    text.append(f", {summary.failed} failed", style="red" if summary.failed else "")
    if summary.aborted:
        text.append(f", {summary.aborted} aborted", style="yellow")
    text.append(f" in {summary.duration_s:.1f} s")
    if result.interrupted:
        text.append(" (interrupted)", style="yellow")
    return text


def _latencies(summary: Summary) -> Table:
    table = _table("", *_COLUMNS.values())
    table.caption, table.caption_justify = "Below each figure its 95 % confidence interval.", "left"
    rows = [
        ("TTFT", summary.ttft_ms),
        ("First gap", summary.first_gap_ms),
        ("ITL", summary.itl_ms),
        ("TPOT", summary.tpot_ms),
        ("E2E", summary.e2e_ms),
    ]
    if summary.offered_per_s is not None:
        rows += [("TTFT sent", summary.service_ttft_ms), ("E2E sent", summary.service_e2e_ms)]
    for name, stat in rows:
        unit, unit_ms = ("s", 1000) if stat.p999 is not None and stat.p999 >= 10_000 else ("ms", 1)
        table.add_row(f"{name}, {unit}", *(_figure(stat, figure, unit_ms) for figure in _COLUMNS))
    return table


def _facts(result: Result) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in [*_named_facts(result.summary), *([] if result.simulated else _client_facts(result.client))]:
        grid.add_row(Text(name), Text(value))
    return grid


def _named_facts(summary: Summary) -> Iterable[tuple[str, str]]:
    yield "Output tokens/s", number(summary.output_tokens_per_s)
    yield "All tokens/s", number(summary.total_tokens_per_s)
    yield "Requests/s", number(summary.requests_per_s)
    if summary.goodput_per_s is not None:
        yield "Goodput/s", f"{number(summary.goodput_per_s)} ({percent(summary.goodput_share)} of all requests)"
    if summary.offered_per_s is not None:
        offered, achieved = number(summary.offered_per_s), number(summary.achieved_per_s)
        yield "Sessions/s", f"{achieved} sent, {offered} offered"
    yield "Schedule lag p99, ms", number(summary.schedule_lag_ms)
    yield "Prompt tokens from cache", percent(summary.cached_token_rate)
    steady = summary.steady
    if steady:
        name = f"Steady, {steady.start_s:.1f} to {steady.end_s:.1f} s"
        yield (
            name,
            f"{number(steady.output_tokens_per_s)} output tokens/s, {number(steady.requests_per_s)} requests/s",
        )
        yield "", f"TTFT {_p50_p99(steady.ttft_ms)}, ITL {_p50_p99(steady.itl_ms)} ms (p50/p99)"


def _client_facts(client: Client) -> Iterable[tuple[str, str]]:
    yield "Client", f"processes {client.processes}, busiest {percent(client.cpu_share)} of a core"
    yield "", f"loop late by {number(client.loop_lag_ms_p50)}/{number(client.loop_lag_ms_p99)} ms (p50/p99)"


def _groups(name: str, groups: Sequence[Group]) -> Table:
    table = _table(name, "done", "failed", "TTFT p50/p99", "ITL p50/p99", "TPOT p50", "E2E p50", "cached")
    for group in groups:
        table.add_row(
            group.name,
            str(group.completed),
            str(group.failed),
            _p50_p99(group.ttft_ms),
            _p50_p99(group.itl_ms),
            number(group.tpot_ms.p50),
            number(group.e2e_ms.p50),
            percent(group.cached_token_rate),
        )
    return table


def _errors(result: Result) -> Table:
    """How often each kind of failure happened, and what the first of its requests was told."""
    details = {row.error: row.detail for row in reversed(result.requests) if row.error != Failure.ABORTED}
    table = _table("Failure", "requests")
    table.add_column("the first one's detail", overflow="fold")
    for kind, count in result.summary.errors.items():
        table.add_row(Text(kind, style="red"), str(count), Text(details.get(kind, "")))
    return table


def _table(name: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, pad_edge=False)
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(stat: Stat, name: str, unit_ms: float) -> Text:
    """The figure above its confidence interval."""
    value: float | None = getattr(stat, name)
    text = Text(_narrow(value and value / unit_ms))
    if name in stat.ci:
        low, high = stat.ci[name]
        text.append(f"\n{_narrow(low / unit_ms)}-{_narrow(high / unit_ms)}", style="dim")
    return text


def _p50_p99(stat: Stat) -> str:
    return f"{_narrow(stat.p50)}/{_narrow(stat.p99)}"


def _narrow(value: float | None) -> str:
    """Without commas: six columns of figures and their intervals fit into a terminal of 80 columns."""
    return number(value).replace(",", "")

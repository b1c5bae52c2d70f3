"""Shows the result of a run in a terminal."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from bench.report.breakdown import error_table, group_table
from bench.report.head import REMEDY
from bench.report.terminal import empty_table, limited_panel, terminal_table
from bench.report.text import number, percent
from bench.result import Client, Result, Stat, Summary

_COLUMNS = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9"}


def show(result: Result, console: Console) -> None:
    """Prints `result`. If the client limited the run, prints only the reasons: its figures would mislead."""
    if result.client.limited:
        console.print(limited_panel(result.client.reasons, REMEDY))
        return
    summary = result.summary
    doubts = [Text(f"Warning: {warning}.", style="yellow") for warning in result.client.warnings]
    parts: list[RenderableType] = [_outcome(result), *doubts, _latencies(summary), _facts(result)]
    for name, groups in (("Turn", summary.by_turn), ("Route", summary.by_route)):
        if table := group_table(name, [("", group) for group in groups]):
            parts.append(terminal_table(table, notes=False))
    if errors := error_table([result]):
        parts.append(terminal_table(errors))
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
    table = empty_table("", *_COLUMNS.values())
    table.caption = "Below each figure its 95 % confidence interval."
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
        rates = f"{number(steady.output_tokens_per_s)} output tokens/s, {number(steady.requests_per_s)} requests/s"
        yield f"Steady, {steady.start_s:.1f} to {steady.end_s:.1f} s", rates
        yield "", f"TTFT {_p50_p99(steady.ttft_ms)}, ITL {_p50_p99(steady.itl_ms)} ms (p50/p99)"


def _client_facts(client: Client) -> Iterable[tuple[str, str]]:
    yield "Client", f"processes {client.processes}, busiest {percent(client.cpu_share)} of a core"
    yield "", f"loop late by {number(client.loop_lag_ms_p50)}/{number(client.loop_lag_ms_p99)} ms (p50/p99)"


def _figure(stat: Stat, name: str, unit_ms: float) -> Text:
    """A figure above its confidence interval."""
    value: float | None = getattr(stat, name)
    text = Text(_narrow(value and value / unit_ms))
    if name in stat.ci:
        low, high = stat.ci[name]
        text.append(f"\n{_narrow(low / unit_ms)}-{_narrow(high / unit_ms)}", style="dim")
    return text


def _p50_p99(stat: Stat) -> str:
    return f"{_narrow(stat.p50)}/{_narrow(stat.p99)}"


def _narrow(value: float | None) -> str:
    """A number without commas, so that six columns with intervals fit into 80 characters."""
    return number(value).replace(",", "")

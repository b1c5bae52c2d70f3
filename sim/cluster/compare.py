"""`cpd sim compare`: finds the highest rate that each policy sustains, with several mixes and errors of prediction."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

from bench.metrics import summarise
from bench.report.curves import LOG_AXIS
from bench.report.page import Cell, Chart, Facts, Notice, Page, Table, series
from bench.report.text import number, percent
from bench.result import write_json
from bench.run import command_line
from bench.sweep.search import MaxRate
from cpd.common.errors import ConfigError
from sim.cluster.policies import make_system
from sim.cluster.settings import MAX_PROFILE_ERROR, CompareSettings
from sim.cluster.simulation import Outcome, SimCluster
from sim.cluster.workload import make_workload
from sim.evidence import evidence


class Row(BaseModel):
    """One policy on one mix with one error of prediction, at the highest rate that it sustains.

    Attributes:
        max_rate: Rate of the workload, in requests a second; None: it sustained no rate that was tried.
        too_much: Lowest rate that it does not sustain.
        requests_per_s: Measured requests a second at that rate; fewer while sessions are young.
        good_per_s: Those within both targets.
        work_imbalance, imbalance, step_imbalance: See `sim.cluster.simulation.Outcome`.
    """

    policy: str
    long_share: float
    profile_error: float
    max_rate: float | None
    too_much: float | None
    requests_per_s: float | None = None
    good_per_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    cached_token_rate: float | None = None
    remote_share: float | None = None
    work_imbalance: float | None = None
    imbalance: float | None = None
    step_imbalance: float | None = None


class Comparison(BaseModel):
    """The content of the `--json` file."""

    schema_: Literal["cpd-sim-compare/1"] = Field("cpd-sim-compare/1", alias="schema")
    simulated: Literal[True] = True
    evidence: str
    command: list[str]
    settings: dict[str, Any]
    rows: list[Row]


def compare(settings: CompareSettings) -> None:
    """Searches the rates, writes the files and prints the table.

    Raises:
        CPDError: The settings contradict each other, or a file cannot be read or written.
    """
    if settings.workload != "mix":
        raise ConfigError("a trace has its own times: `cpd sim compare` needs --workload mix")
    policies = _policies(settings)
    long_shares = _numbers("long-shares", settings.long_shares, 1.0) or [settings.long_share]
    errors = _numbers("profile-errors", settings.profile_errors, MAX_PROFILE_ERROR) or [settings.profile_error]
    messages = Console(stderr=True)
    rows = []
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        jobs = [
            one.model_copy(update={"long_share": share, "profile_error": error})
            for share, error, one in product(long_shares, errors, policies)
        ]
        for row in pool.map(search_rate, jobs):
            mix = f"{percent(row.long_share)} long, predictions wrong by {percent(row.profile_error)}"
            messages.print(f"{row.policy}, {mix}: {number(row.max_rate)} requests/s at most")
            rows.append(row)
    found = Comparison(
        schema="cpd-sim-compare/1",
        evidence=evidence(settings.profile),
        command=command_line(sys.argv),
        settings=settings.model_dump(mode="json"),
        rows=rows,
    )
    if settings.json_file:
        write_json(found, settings.json_file)
    if settings.html_file:
        _write_html(found, settings.html_file)
    _show(found, Console())


def _policies(settings: CompareSettings) -> list[CompareSettings]:
    """Returns the settings of each policy."""
    named = [
        settings.model_copy(update={"policy": settings.policy.model_copy(update={"name": name.strip()})})
        for name in settings.policies.split(",")
    ]
    for one in named:
        make_system(one.policy)
    return named


def _numbers(flag: str, text: str, most: float) -> list[float]:
    """Returns the numbers of a comma-separated list."""
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [inf]
    if not all(0 <= one <= most for one in numbers):
        raise ConfigError(f"--{flag} takes numbers from 0 to {most:g}, separated by commas")
    return numbers


def search_rate(settings: CompareSettings) -> Row:
    """Searches the highest rate that the policy sustains."""
    search = MaxRate(settings.rate_from, settings.precision)
    best = None
    while (rate := search.next()) is not None:
        cluster = SimCluster(settings, make_workload(settings, rate))
        sustained = cluster.sustains(settings.good_share, rate * settings.duration)
        search.tell(rate, sustained)
        if sustained:
            best = cluster
    if best is None or search.met is None:
        return Row(
            policy=settings.policy.name,
            long_share=settings.long_share,
            profile_error=settings.profile_error,
            max_rate=None,
            too_much=search.missed,
        )
    return as_row(settings, search.met, best.run()).model_copy(update={"too_much": search.missed})


def as_row(settings: CompareSettings, rate: float, outcome: Outcome) -> Row:
    """Returns the figures of a run at this rate."""
    summary, rows = summarise(outcome.records, start_s=settings.warmup, slo=None, offered_per_s=None)
    return Row(
        policy=settings.policy.name,
        long_share=settings.long_share,
        profile_error=settings.profile_error,
        max_rate=rate,
        too_much=None,
        requests_per_s=len(rows) / settings.duration,
        good_per_s=outcome.good / settings.duration,
        ttft_p50_ms=summary.ttft_ms.p50,
        ttft_p99_ms=summary.ttft_ms.p99,
        itl_p50_ms=summary.itl_ms.p50,
        itl_p99_ms=summary.itl_ms.p99,
        cached_token_rate=summary.cached_token_rate,
        remote_share=sum(row.route == "remote" for row in rows) / len(rows) if rows else None,
        work_imbalance=outcome.work_imbalance,
        imbalance=outcome.imbalance,
        step_imbalance=outcome.step_imbalance,
    )


_COLUMNS = (
    "Long",
    "Error",
    "Policy",
    "Rate",
    "Ratio",
    "TTFT p99",
    "ITL p99",
    "Cached",
    "Remote",
    "Work",
    "Requests",
    "Steps",
)
_NOTE = (
    "Error: how wrong predictions are. Rate: the highest sustained, in requests a second; ratio: to the first "
    "policy's. The other columns are from the run at that rate, times in ms. The last three are maximum over mean: of "
    "device time, over all workers; of requests and of decode step times, over the combined workers."
)


def _cells(found: Comparison) -> Iterator[list[str]]:
    name = found.rows[0].policy
    first = {(row.long_share, row.profile_error): row.max_rate for row in reversed(found.rows) if row.policy == name}
    for row in found.rows:
        base = first[row.long_share, row.profile_error]
        ratio = f"x {row.max_rate / base:.2f}" if row.max_rate and base else "-"
        yield [
            percent(row.long_share),
            f"±{percent(row.profile_error)}",
            row.policy,
            number(row.max_rate),
            ratio,
            number(row.ttft_p99_ms),
            number(row.itl_p99_ms),
            percent(row.cached_token_rate),
            percent(row.remote_share),
            number(row.work_imbalance),
            number(row.imbalance),
            number(row.step_imbalance),
        ]


def _show(found: Comparison, console: Console) -> None:
    table = TerminalTable(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "Policy" else "right", no_wrap=True)
    for cells in _cells(found):
        table.add_row(*cells)
    console.print(table, _NOTE)
    console.print(f"{found.evidence[0].upper()}{found.evidence[1:]}.")


def _write_html(found: Comparison, path: Path) -> None:
    page = Page("Policies compared", "highest rate of requests within the latency targets")
    page.add(Notice("warn", f"{found.evidence[0].upper()}{found.evidence[1:]}", []))
    page.add(Facts("Command", [("command", " ".join(found.command))]))
    rows: list[Sequence[str | Cell]] = [list(cells) for cells in _cells(found)]
    page.add(Table(_COLUMNS, rows, note=_NOTE, prose=(2,)))
    lines = list(dict.fromkeys((row.policy, row.profile_error) for row in found.rows))
    page.add(
        Chart(
            "Requests/s sustained, by the share of long prompts",
            [
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{name}, ±{percent(error)}",
                    "x": [
                        100 * row.long_share for row in found.rows if (row.policy, row.profile_error) == (name, error)
                    ],
                    "y": [row.max_rate for row in found.rows if (row.policy, row.profile_error) == (name, error)],
                    "line": {"color": series(index)},
                }
                for index, (name, error) in enumerate(lines)
            ],
            {"xaxis": {"title": {"text": "Long prompts, % of the requests"}}, "yaxis": LOG_AXIS},
            wide=True,
        )
    )
    page.write(path)

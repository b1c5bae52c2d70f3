"""The HTML report of one run, or of several runs overlaid."""

from collections.abc import Sequence
from pathlib import Path

from bench.report.breakdown import error_table, group_table, phase_chart, slowest, turn_chart
from bench.report.comparison import differences, figures
from bench.report.curves import Series
from bench.report.head import (
    cards,
    comparison_table,
    difference_table,
    facts,
    latency_table,
    ratio_cards,
    verdict,
    verdicts,
)
from bench.report.latency import cdf_chart, itl_histogram
from bench.report.page import Page, series
from bench.report.scatter import schedule_lag, ttft_by_prompt, ttft_over_time
from bench.report.timeline import requests_by_worker, timeline
from bench.result import Result
from bench.slo import Slo

_STRETCHED = "The axis of the CDFs is stretched, 90 %, 99 % and 99.9 % equally far apart, so that the tail can be read."


def write_html(results: Sequence[Result], path: Path) -> None:
    """Writes a report of the runs to `path`. Runs are compared with the first one.

    For a run that the client limited, it shows only the reasons: the figures would mislead.

    Raises:
        BenchError: The file cannot be written.
    """
    report(results).write(path)


def report(results: Sequence[Result]) -> Page:
    """The page that `write_html` writes."""
    alone = len(results) == 1
    page = Page(" vs ".join(result.label for result in results), _subtitle(results))
    page.add(*([verdict(results[0])] if alone else verdicts(results)), facts(results))
    runs = [Series(result.label, series(index), result.requests) for index, result in enumerate(results)]
    page.add(schedule_lag([run for run, result in zip(runs, results, strict=True) if result.client.limited]))
    sound = [result for result in results if not result.client.limited]
    if len(sound) == 1:
        page.add(cards(sound[0]), latency_table(sound[0]))
    elif sound:
        rows = figures(sound)
        page.add(ratio_cards(rows) if len(sound) == 2 else None)
        page.add(difference_table(differences(sound), sound), comparison_table(rows, sound))
    if sound:
        _charts(page, sound, [run for run, result in zip(runs, results, strict=True) if not result.client.limited])
    return page


def _subtitle(results: Sequence[Result]) -> str:
    if len(results) > 1:
        return f"{len(results)} runs of cpd bench"
    settings = results[0].settings
    parts = [f"{settings.get('workload', '')} workload", str(settings.get("url", "")), results[0].started_at]
    return " · ".join(part for part in parts if part)


def _charts(page: Page, results: Sequence[Result], runs: Sequence[Series]) -> None:
    """Adds the charts. Colours distinguish runs, or the routes of a single run."""
    single = len(runs) == 1
    routes = _routes(results[0]) if single else []
    lines = [Series("all", runs[0].colour, runs[0].requests), *routes] if routes else runs
    clouds = routes or runs
    slo = Slo.parse(text) if single and (text := str(results[0].settings.get("slo") or "")) else Slo()

    page.section("Latency", _STRETCHED)
    page.add(
        cdf_chart("TTFT", "ttft_ms", lines, slo.ttft),
        cdf_chart("ITL", "itl_ms", lines, slo.itl),
        cdf_chart("E2E", "e2e_ms", lines, slo.e2e),
        itl_histogram(lines),
    )
    page.section("Time line")
    page.add(timeline(runs, results[0].summary.steady if single else None))
    page.add(ttft_over_time(clouds), ttft_by_prompt(clouds, uncached=False))
    if single:
        page.add(requests_by_worker(results[0].requests))

    page.section("Breakdown")
    tails = [slowest("slowest 1 %" if single else f"{run.name}<br>slowest 1 %", run.requests) for run in runs]
    page.add(phase_chart([*lines, *tails]), ttft_by_prompt(clouds, uncached=True), turn_chart(results))
    named = [("" if single else result.label, result.summary) for result in results]
    page.add(group_table("Routes", [(name, group) for name, summary in named for group in summary.by_route]))
    page.add(group_table("Turns", [(name, group) for name, summary in named for group in summary.by_turn]))

    page.section("Errors")
    page.add(error_table(results))


def _routes(result: Result) -> list[Series]:
    """The routes of a run; empty if there is only one."""
    names = [group.name for group in result.summary.by_route]
    return [
        Series(name, series(index + 1), [request for request in result.requests if request.route == name])
        for index, name in enumerate(names)
        if len(names) > 1
    ]

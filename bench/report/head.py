"""The blocks at the top of a report: verdict, figures with intervals, comparison."""

from collections.abc import Sequence

from bench.report.comparison import Difference, Figure
from bench.report.page import Card, Cards, Cell, Facts, Notice, Table, Tone
from bench.report.text import count, interval, milliseconds, number, percent
from bench.result import Client, Result, Stat

_PERCENTILES = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "mean": "mean"}
REMEDY = (
    "The figures would be the client's, not the server's, and are not shown. Run the client on cores that no server "
    "uses, with more cores and --processes, or with less --concurrency or --rate."
)
_INTERVALS = "Below a figure: its 95 % confidence interval."


def verdict(result: Result) -> Notice:
    """The verdict on a single run."""
    if result.client.limited:
        return Notice("bad", "The client could not keep up", [*result.client.reasons, REMEDY])
    found = troubles(result)
    health = [] if result.simulated else [_health(result.client)]
    return Notice("warn" if found else "good", _done(result), [*found, *health])


def verdicts(results: Sequence[Result]) -> list[Notice]:
    """The verdicts on several runs: one for each that the client limited, and one for the others."""
    limited = [result for result in results if result.client.limited]
    notices = [
        Notice("bad", f"{result.label}: the client could not keep up", [*result.client.reasons, REMEDY])
        for result in limited
    ]
    sound = [result for result in results if not result.client.limited]
    lines = [" ".join([f"{result.label}: {_done(result)}.", *troubles(result)]) for result in sound]
    if lines:
        trouble = any(troubles(result) for result in sound)
        notices.append(
            Notice(
                "warn" if trouble else "good",
                "Simulated" if all(result.simulated for result in sound) else "The client kept up in these runs",
                lines,
            )
        )
    return notices


def _done(result: Result) -> str:
    return f"{count(result.summary.completed, 'request')} completed in {number(result.summary.duration_s)} s"


def troubles(result: Result) -> list[str]:
    """Reasons to doubt the figures of a run."""
    summary = result.summary
    found = []
    if result.interrupted:
        found.append(f"Interrupted: {count(summary.aborted, 'request')} in flight aborted.")
    if summary.failed:
        kinds = ", ".join(f"{amount:,} {kind}" for kind, amount in summary.errors.items())
        found.append(f"{count(summary.failed, 'request')} failed: {kinds}.")
    return [*found, *(f"Warning: {warning}." for warning in result.client.warnings)]


def _health(client: Client) -> str:
    processes = "1 process" if client.processes == 1 else f"{client.processes} processes"
    text = f"The client kept up: {processes}, busiest at {100 * client.cpu_share:.0f} % of a core"
    text += f", event loop late by {milliseconds(client.loop_lag_ms_p99)} (p99)"
    if client.selftest:
        errors = f"TTFT {percent(client.selftest.ttft_error)}, ITL {percent(client.selftest.itl_error)}"
        text += f"; self-test error {errors}"
    return text + "."


def cards(result: Result) -> Cards:
    """The main figures."""
    summary = result.summary
    slo = str(result.settings.get("slo") or "")
    shown = [
        Card("TTFT p50", milliseconds(summary.ttft_ms.p50), f"p99 {milliseconds(summary.ttft_ms.p99)}"),
        Card("ITL p50", milliseconds(summary.itl_ms.p50), f"p99 {milliseconds(summary.itl_ms.p99)}"),
        Card("E2E p50", milliseconds(summary.e2e_ms.p50), f"p99 {milliseconds(summary.e2e_ms.p99)}"),
        Card(
            "Output tokens/s", number(summary.output_tokens_per_s), f"{number(summary.total_tokens_per_s)} with prompts"
        ),
        Card("Requests/s", number(summary.requests_per_s), _offered(result)),
    ]
    if summary.goodput_share is not None:
        shown.append(Card("Goodput", percent(summary.goodput_share), f"{number(summary.goodput_per_s)}/s within {slo}"))
    if summary.cached_token_rate is not None:
        shown.append(Card("Cached prompt", percent(summary.cached_token_rate), f"of {number(summary.prompt_tokens)}"))
    everything = summary.completed + summary.failed
    failed: Tone = "bad" if summary.failed else ""
    shown.append(Card("Failed", f"{summary.failed:,}", f"of {count(everything, 'request')}", failed))
    return Cards(shown)


def _offered(result: Result) -> str:
    summary = result.summary
    if summary.offered_per_s is None:
        return ""
    return f"{number(summary.achieved_per_s)} sent, {number(summary.offered_per_s)} offered"


def latency_table(result: Result) -> Table:
    """A row for each latency with its percentiles."""
    summary = result.summary
    rows: list[tuple[str, str, Stat]] = [
        ("TTFT", "first text", summary.ttft_ms),
        ("First gap", "first to second", summary.first_gap_ms),
        ("ITL", "all gaps", summary.itl_ms),
        ("TPOT", "a request's mean", summary.tpot_ms),
        ("E2E", "to the end", summary.e2e_ms),
    ]
    if summary.offered_per_s is not None:
        rows += [
            ("TTFT, from sending", "", summary.service_ttft_ms),
            ("E2E, from sending", "", summary.service_e2e_ms),
        ]
    note = _INTERVALS
    if steady := summary.steady:
        rows += [("TTFT, steady", "", steady.ttft_ms), ("ITL, steady", "", steady.itl_ms)]
        note += (
            f" Steady: from {number(steady.start_s)} s to {number(steady.end_s)} s, without ramp-up and drain; "
            f"{number(steady.output_tokens_per_s)} output tokens/s, {number(steady.requests_per_s)} requests/s there."
        )
    cells: list[list[str | Cell]] = [
        [
            Cell(name, meaning),
            *(Cell(number(getattr(stat, figure)), interval(stat.ci.get(figure))) for figure in _PERCENTILES),
            f"{stat.count:,}",
        ]
        for name, meaning, stat in rows
    ]
    return Table(["", *_PERCENTILES.values(), "samples"], cells, "Latency, ms", note)


def facts(results: Sequence[Result]) -> Facts:
    """Commands, versions and other facts to look up."""
    pairs = []
    for result in results:
        if len(results) > 1:
            pairs.append(("run", result.label))
        pairs += [
            ("command", " ".join(result.command)),
            ("started", result.started_at),
            ("seed", str(result.seed)),
            ("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
            ("schedule lag p99", milliseconds(result.summary.schedule_lag_ms)),
        ]
    return Facts("Command and versions" if len(results) == 1 else "Commands and versions", pairs)


def ratio_cards(rows: Sequence[Figure]) -> Cards:
    """The main ratios of the second run to the first."""
    wanted = ["TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms", "E2E p50, ms", "Output tokens/s"]
    found = {row.name: row for row in rows}
    shown = []
    for row in (found[name] for name in wanted if name in found):
        ratio = _ratio(row, 1)
        shown.append(Card(row.name, ratio.text, f"{number(row.values[1])} against {number(row.values[0])}", ratio.tone))
    return Cards(shown)


def comparison_table(rows: Sequence[Figure], results: Sequence[Result]) -> Table:
    """A row for each figure. Every run but the first has its ratio to the first, coloured if it is not chance."""
    columns = [""]
    for index, result in enumerate(results):
        columns += [result.label] if index == 0 else [result.label, "ratio"]
    cells = []
    for row in rows:
        line: list[str | Cell] = [row.name]
        for run, value in enumerate(row.values):
            line.append(Cell(number(value), interval(row.intervals[run])))
            if run:
                line.append(_ratio(row, run))
        cells.append(line)
    note = (
        f"{_INTERVALS} Ratios are to {results[0].label}: green is better, red is worse. Where the intervals overlap, "
        "the difference may be chance."
    )
    return Table(columns, cells, "Figures", note)


def difference_table(changed: Sequence[Difference], results: Sequence[Result]) -> Table | None:
    """A row for each setting in which the runs differ; None if there is none."""
    if not changed:
        return None
    rows: list[list[str | Cell]] = [
        [
            Cell(
                difference.name, "" if difference.same_load else "another load", "" if difference.same_load else "warn"
            ),
            *difference.values,
        ]
        for difference in changed
    ]
    return Table(["", *(result.label for result in results)], rows, "Settings that differ")


def _ratio(row: Figure, run: int) -> Cell:
    ratio, overlap, better = row.ratio(run), row.overlap(run), row.better(run)
    if ratio is None:
        return Cell("-")
    tone: Tone = "" if better is None else "good" if better else "bad"
    return Cell(f"{number(ratio)}x", "" if overlap is None else "overlap" if overlap else "apart", tone)

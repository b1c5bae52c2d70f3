"""Runs `cpd bench run`, from the settings to the exit code."""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from bench.arrivals import ClosedLoop, OpenLoop, plan_arrivals
from bench.errors import BenchError
from bench.load.interrupt import first_interrupt
from bench.load.plan import Plan
from bench.load.run import Enough, enough_processes, never, run_load
from bench.metrics import summarise
from bench.prepare import Prepared, cluster_snapshot, prepare
from bench.report.html import write_html
from bench.report.progress import LiveProgress
from bench.report.table import show
from bench.report.text import milliseconds
from bench.result import Accuracy, Client, Result, Summary, write_json
from bench.selftest import selftest
from bench.settings import RunSettings, TargetSettings
from bench.slo import Slo
from bench.verdict import doubts, inaccurate, why_limited
from bench.workloads.make import make_workload

EXIT_NOTHING_COMPLETED = 1
EXIT_CLIENT_LIMITED = 3
EXIT_INTERRUPTED = 130

UNKNOWN_STREAMS = 64  # assumed for an open loop


def run(settings: RunSettings) -> int:
    """Runs, saves and shows one load. Returns the exit code."""
    check_writable(settings)
    messages = Console(stderr=True)
    slo = Slo.parse(settings.slo) if settings.slo else None
    prepared, accuracy = begin(settings, _streams(settings), _processes(settings), messages)
    with LiveProgress(messages) as progress:
        result = measure(settings, prepared, slo, accuracy, progress)
    late = save_and_show(
        settings, result, lambda page: write_html([result], page), lambda console: show(result, console)
    )
    return EXIT_INTERRUPTED if late else exit_code(result)


def save_and_show(
    settings: TargetSettings,
    result: BaseModel,
    write_page: Callable[[Path], object],
    show: Callable[[Console], object],
) -> bool:
    """Saves a result to the files of the settings, and shows it. Ctrl-C waits until that is done.

    Returns:
        True if Ctrl-C was pressed meanwhile.

    Raises:
        BenchError: The result could not be saved; it was shown.
    """
    with first_interrupt() as late:
        try:
            if settings.json_file:
                write_json(result, settings.json_file)
            if settings.html_file:
                write_page(settings.html_file)
        finally:  # even if the disk is full
            show(Console())
    return bool(late)


def measure(
    settings: RunSettings,
    prepared: Prepared,
    slo: Slo | None,
    accuracy: Accuracy | None,
    progress: LiveProgress,
    enough: Enough = never,
) -> Result:
    """Runs one load. `enough` may end it early, and so does Ctrl-C, with the figures so far.

    While figures are computed, Ctrl-C only marks the result as interrupted.
    """
    workload = make_workload(settings, prepared.texts, prepared.seed)
    arrivals = plan_arrivals(settings, workload.size, workload.times_s, prepared.seed)
    if isinstance(arrivals, ClosedLoop):
        progress.begin(arrivals.sessions, arrivals.duration_s)
    else:
        progress.begin(len(arrivals.due_s), None)
    plan = Plan(prepared.target, settings, prepared.texts, prepared.seed, _processes(settings))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    before = cluster_snapshot(prepared.target)
    report = run_load(plan, progress, enough)
    offered_per_s = None
    if isinstance(arrivals, OpenLoop):  # of a run that ended early, only the sessions begun
        begun = len({record.session for record in report.records})
        offered_per_s = OpenLoop(arrivals.due_s[:begun]).offered_per_s
    with first_interrupt() as late:
        summary, requests = summarise(report.records, start_s=report.start_s, slo=slo, offered_per_s=offered_per_s)
        reasons = why_limited(summary, report.health, accuracy)
        result = Result(
            label=f"{prepared.target.model} {settings.workload} {load_name(settings)}",
            command=command_line(sys.argv),
            started_at=started_at,
            versions=versions(),
            settings=settings.model_dump(mode="json"),
            seed=prepared.seed,
            interrupted=report.interrupted,
            cluster_before=before,
            cluster_after=cluster_snapshot(prepared.target),
            client=Client(
                limited=bool(reasons),
                reasons=reasons,
                warnings=[*prepared.warnings, *doubts(summary, report.health), *_unmet_target(summary, settings.slo)],
                selftest=accuracy,
                **asdict(report.health),
            ),
            summary=summary,
            requests=requests,
        )
    result.interrupted |= bool(late)
    return result


def begin(
    settings: TargetSettings, streams: int, processes: int, messages: Console
) -> tuple[Prepared, Accuracy | None]:
    """Prepares a measurement: trial requests to the server, then the self-test of the client."""
    prepared = prepare(settings)
    for warning in prepared.warnings:
        messages.print(f"warning: {warning}", style="yellow", markup=False)
    if not settings.selftest:
        return prepared, None
    with messages.status("Measuring the client itself"):
        accuracy = selftest(streams, processes)
    for reason in inaccurate(accuracy):
        messages.print(f"warning: there will be no figures: {reason}", style="red", markup=False)
    return prepared, accuracy


def versions() -> dict[str, str]:
    """Versions of the software that measures."""
    return {"cpd": version("cpd"), "python": platform.python_version(), "system": platform.platform()}


def exit_code(result: Result) -> int:
    """Exit code of a run."""
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.client.limited:
        return EXIT_CLIENT_LIMITED
    return 0 if result.summary.completed else EXIT_NOTHING_COMPLETED


def load_name(settings: RunSettings) -> str:
    """Name of the load, such as `concurrency 16`."""
    for name in ("concurrency", "rate", "users"):
        if getattr(settings, name) is not None:
            return f"{name} {getattr(settings, name):g}"
    return f"speedup {settings.speedup:g}"


def command_line(arguments: Sequence[str]) -> list[str]:
    """The command line with its API key masked."""
    shown = [os.path.basename(arguments[0]), *arguments[1:]]
    for index, argument in enumerate(shown):
        if argument == "--api-key" and index + 1 < len(shown):
            shown[index + 1] = "***"
        elif argument.startswith("--api-key="):
            shown[index] = "--api-key=***"
    return shown


def check_writable(settings: TargetSettings) -> None:
    """Checks before a run that its result can be written.

    Raises:
        BenchError: An output file is a directory, or its directory is missing or not writable.
    """
    for path in (settings.json_file, settings.html_file):
        if path and path.is_dir():
            raise BenchError(f"cannot write {path}: it is a directory")
        if path and not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
            raise BenchError(f"cannot write {path}: its directory is missing or not writable")


def _unmet_target(summary: Summary, slo: str) -> list[str]:
    """Warns about a latency target that no request met."""
    if summary.goodput_share != 0 or not summary.completed:
        return []
    return [f"no request met the target {slo}; TTFT p50 is {milliseconds(summary.ttft_ms.p50)}, see above"]


def _streams(settings: RunSettings) -> int:
    return settings.concurrency or settings.users or UNKNOWN_STREAMS


def _processes(settings: RunSettings) -> int:
    return settings.processes or enough_processes(_streams(settings))

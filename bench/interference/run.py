"""Runs `cpd bench interference`, from the settings to the exit code."""

import asyncio
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median

import uvloop
from rich.console import Console

from bench.client.client import Client
from bench.interference.page import write_page
from bench.interference.result import Cell, InterferenceResult
from bench.interference.settings import InterferenceSettings
from bench.interference.study import Study, StudyError
from bench.interference.table import show
from bench.interference.verdicts import is_client_late, shape, verdicts
from bench.prepare import Prepared
from bench.result import Accuracy
from bench.result import Client as ClientPart
from bench.run import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_COMPLETED,
    begin,
    check_writable,
    command_line,
    save_and_show,
    versions,
)
from bench.verdict import slow_client


def interference(settings: InterferenceSettings) -> int:
    """Runs, saves and shows the study. Returns the exit code.

    Raises:
        BenchError: The study cannot start, or its result cannot be written.
        ConfigError: A setting is invalid.
    """
    settings.grid()  # refuses a malformed grid before anything is sent
    check_writable(settings)
    messages = Console(stderr=True)
    prepared, accuracy = begin(settings, settings.decodes, 1, messages)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(settings, prepared, accuracy, messages))
    late = save_and_show(settings, result, lambda page: write_page(result, page), lambda console: show(result, console))
    return EXIT_INTERRUPTED if late else _exit_code(result)


async def measure(
    settings: InterferenceSettings, prepared: Prepared, accuracy: Accuracy | None, messages: Console
) -> InterferenceResult:
    """Runs the study. Cancelling ends it and keeps the bursts so far."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    error, interrupted = "", False
    client = Client(prepared.target, prepared.texts.count)
    with messages.status("Starting") as status:
        study = Study(client, prepared.texts, settings, prepared.seed, status.update)
        try:
            await study.run(lambda cell: messages.print(_line(cell), highlight=False, markup=False))
        except StudyError as failure:
            error = str(failure)
        except asyncio.CancelledError:
            interrupted = True
    await client.close()
    found = shape(study.cells)
    return InterferenceResult(
        label=f"{prepared.target.model}, {settings.decodes} decode streams",
        command=command_line(sys.argv),
        started_at=started_at,
        versions=versions(),
        settings=settings.model_dump(mode="json"),
        seed=prepared.seed,
        interrupted=interrupted,
        error=error,
        client=_client(study, accuracy),
        cells=study.cells,
        shape=found,
        verdicts=verdicts(study.cells, found),
    )


def _client(study: Study, accuracy: Accuracy | None) -> ClientPart:
    bursts = [burst for cell in study.cells for burst in cell.bursts]
    # A constant delay cancels out in gaps, but not in TTFT.
    ttft_ms = [time_ms for burst in bursts for time_ms in burst.ttft_ms]
    reasons = slow_client(study.health, accuracy, {"TTFT": median(ttft_ms) if ttft_ms else None})
    late = sum(is_client_late(burst) for burst in bursts)
    if late > len(bursts) / 2:
        reasons.append(f"in {late} of {len(bursts)} bursts its own delays make up much of the longest gap")
    return ClientPart(limited=bool(reasons), reasons=reasons, selftest=accuracy, **asdict(study.health))


def _line(cell: Cell) -> str:
    if cell.increase_percent is None:
        return f"{cell.name}: {cell.error}"
    return f"{cell.name}: {cell.increase_percent.median:+,.0f} %"


def _exit_code(result: InterferenceResult) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.client.limited:
        return EXIT_CLIENT_LIMITED
    return 0 if any(cell.bursts for cell in result.cells) and not result.error else EXIT_NOTHING_COMPLETED

"""The commands of `cpd bench`. Each imports its implementation when it is used."""

from pathlib import Path
from typing import Annotated

import typer

from bench.interference.settings import InterferenceSettings
from bench.settings import RunSettings
from bench.sweep.settings import SweepSettings
from cpd.common.options import clean_exit, command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure any server with an OpenAI-compatible endpoint.",
)


def _run(settings: RunSettings) -> None:
    """Send one load to a server and report latencies and throughput.

    Exit codes: 0 measured, 1 nothing completed or the run could not start, 3 the client was too slow, 130 Ctrl-C.
    """
    from bench.run import run

    raise typer.Exit(run(settings))


def _sweep(settings: SweepSettings) -> None:
    """Run one workload at several loads, or find the highest rate that meets a latency target.

    Exit codes are those of `run`.
    """
    from bench.sweep.run import sweep

    raise typer.Exit(sweep(settings))


def _interference(settings: InterferenceSettings) -> None:
    """Measure how much arriving prompts slow down running streams."""
    from bench.interference.run import interference

    raise typer.Exit(interference(settings))


app.command("run")(command(RunSettings, _run))
app.command("sweep")(command(SweepSettings, _sweep))
app.command("interference")(command(InterferenceSettings, _interference))


@app.command()
def compare(
    results: Annotated[list[Path], typer.Argument(help="Result files of `cpd bench run --json`.", show_default=False)],
    html: Annotated[Path | None, typer.Option("--html", help="File for a report with charts.")] = None,
) -> None:
    """Compare runs with the first one: ratios, and whether the confidence intervals overlap."""
    from rich.console import Console

    from bench.compare import compare as compare_results

    with clean_exit():
        compare_results(results, html, Console())


@app.command()
def selftest(
    streams: Annotated[int, typer.Option("--streams", min=1, help="Concurrent streams.")] = 64,
    processes: Annotated[int, typer.Option("--processes", min=0, help="Client processes; 0 chooses.")] = 0,
) -> None:
    """Measure the client's own error against a mock server with known timing.

    Exit code 3: the client is too slow for this many streams.
    """
    from rich.console import Console

    from bench.load.run import enough_processes
    from bench.run import EXIT_CLIENT_LIMITED
    from bench.selftest import report
    from bench.selftest import selftest as measure_client
    from bench.verdict import inaccurate

    with clean_exit():
        accuracy = measure_client(streams, processes or enough_processes(streams))
    report(accuracy, Console())
    if reasons := inaccurate(accuracy):
        Console().print(*reasons, style="red")
        raise typer.Exit(EXIT_CLIENT_LIMITED)

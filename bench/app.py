"""`cpd bench …`: the commands. What they do is imported when one is used."""

import typer

from bench.settings import RunSettings
from cpd.options import command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure any server with an OpenAI-compatible endpoint.",
)


def _run(settings: RunSettings) -> None:
    """Send one load to a server and report its latencies and throughput.

    Exit codes: 0 measured, 1 nothing completed or the run could not start, 3 the client was too slow, 130 Ctrl-C.
    """
    from bench.run import run

    raise typer.Exit(run(settings))


app.command("run")(command(RunSettings, _run))

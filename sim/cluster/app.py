"""`cpd sim …`: the commands. What they do is imported when one is used."""

import typer

from cpd.common.options import command
from sim.cluster.settings import CompareSettings, SimSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Simulate whole clusters. Scheduler and routing are the real ones; devices are not needed.",
)


def _run(settings: SimSettings) -> None:
    """Simulate one policy under one load and report its latencies and throughput, as `cpd bench run` does."""
    from sim.cluster.run import run

    run(settings)


def _compare(settings: CompareSettings) -> None:
    """Search the highest rate of requests that each policy sustains within the latency targets."""
    from sim.cluster.compare import compare

    compare(settings)


app.command("run")(command(SimSettings, _run))
app.command("compare")(command(CompareSettings, _compare))

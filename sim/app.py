"""The `cpd sim` commands. Each imports what it needs when it is used."""

import typer

from cpd.common.options import command
from sim.cluster.settings import CompareSettings, SimSettings
from sim.models.settings import ModelsSettings

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate whole clusters without devices, with the real scheduler and routing.",
)


def _run(settings: SimSettings) -> None:
    """Simulate one policy under one load.

    Reports latencies and throughput as `cpd bench run` does.
    """
    from sim.cluster.run import run

    run(settings)


def _compare(settings: CompareSettings) -> None:
    """Find the highest rate that each policy sustains within the latency targets."""
    from sim.cluster.compare import compare

    compare(settings)


def _models(settings: ModelsSettings) -> None:
    """Simulate many models that share few devices, with several policies for who is awake."""
    from sim.models.run import run

    run(settings)


app.command("run")(command(SimSettings, _run))
app.command("compare")(command(CompareSettings, _compare))
app.command("models")(command(ModelsSettings, _models))

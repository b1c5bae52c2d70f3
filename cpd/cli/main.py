"""The `cpd` command. Each subcommand imports what it needs when it is used."""

from typing import Annotated

import typer

from bench.app import app as bench_app
from cpd.cli.profile import app as profile_app
from cpd.cli.transfer import bench_transfer
from cpd.common.lifecycle import MAX_DRAIN_S
from cpd.common.options import clean_exit, command
from cpd.common.settings import ClusterSettings
from kvtransfer.bench.settings import TransferBenchSettings
from sim.cluster.app import app as sim_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

bench_app.command("transfer")(command(TransferBenchSettings, bench_transfer))
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")
app.add_typer(sim_app, name="sim")

ClusterName = Annotated[str, typer.Option("--cluster", envvar="CPD_CLUSTER", help="Name of the cluster.")]


@app.callback()
def cpd() -> None:
    """Serve large language models from a cluster of combined and prefill workers."""


def _up(settings: ClusterSettings) -> None:
    """Start a cluster and run it until Ctrl-C."""
    from deploy.up import up
    from models import tiny

    if not settings.model:
        name = settings.served_model_name or tiny.NAME
        settings = settings.model_copy(update={"model": str(tiny.CHECKPOINT), "served_model_name": name})
    up(settings)


app.command("up")(command(ClusterSettings, _up))


@app.command()
def status(
    cluster: ClusterName = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole of GET /cluster as JSON.")] = False,
) -> None:
    """Show the running cluster: workers, load and cache."""
    from deploy.remote import status as show_status

    with clean_exit():
        show_status(cluster, as_json)


@app.command()
def trace(
    cluster: ClusterName = "default",
    worker: Annotated[str, typer.Option("--worker", help="Name of one worker; default: all workers.")] = "",
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Only steps of the last seconds; 0: all.")] = 0.0,
    chrome: Annotated[
        bool, typer.Option("--chrome", help="Use the format of ui.perfetto.dev, not JSON lines.")
    ] = False,
) -> None:
    """Print the last engine steps as JSON lines."""
    from deploy.trace import trace as write_trace

    with clean_exit():
        write_trace(cluster, worker, seconds, chrome)


@app.command()
def drain(
    name: Annotated[str, typer.Argument(help="Name of the worker or router, as `cpd status` shows it.")],
    cluster: ClusterName = "default",
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            max=MAX_DRAIN_S,
            help="Time for running requests to end by themselves, in seconds. Then a worker's move to another worker, "
            "and a router's fail. Default: its --drain-s.",
        ),
    ] = None,
) -> None:
    """End a worker or router without losing a request; it is not started again."""
    from deploy.drain import drain as drain_process

    with clean_exit():
        drain_process(cluster, name, timeout)


@app.command()
def down(cluster: ClusterName = "default") -> None:
    """Stop the running cluster."""
    from deploy.remote import down as stop

    with clean_exit():
        stop(cluster)


def main() -> None:
    """Entry point of the console script."""
    app()

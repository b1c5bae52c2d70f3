"""The `cpd` command. Each subcommand imports what it needs when it is used."""

from importlib.metadata import version
from typing import Annotated

import typer

from bench.app import app as bench_app
from cpd.cli.profile import app as profile_app
from cpd.cli.transfer import bench_transfer
from cpd.common.errors import ConfigError
from cpd.common.lifecycle import MAX_DRAIN_S
from cpd.common.options import clean_exit, command
from cpd.common.settings import ClusterSettings, Role
from kvtransfer.bench.settings import TransferBenchSettings
from sim.app import app as sim_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

bench_app.command("transfer")(command(TransferBenchSettings, bench_transfer))
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")
app.add_typer(sim_app, name="sim")

ClusterName = Annotated[str, typer.Option("--cluster", envvar="CPD_CLUSTER", help="Name of the cluster.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cpd {version('cpd')}")
        raise typer.Exit


@app.callback()
def cpd(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models from a cluster of combined and prefill workers."""


def _with_model(settings: ClusterSettings) -> ClusterSettings:
    """Returns the settings with the bundled model, if they name none."""
    from models import tiny

    if settings.model or settings.models:
        return settings
    name = settings.served_model_name or tiny.NAME
    return settings.model_copy(update={"model": str(tiny.CHECKPOINT), "served_model_name": name})


def _up(settings: ClusterSettings) -> None:
    """Start a cluster and run it until Ctrl-C; with --detach, in the background until `cpd down`."""
    from deploy.up import up

    up(_with_model(settings))


def _doctor(settings: ClusterSettings) -> None:
    """Check whether a cluster with these settings can start here: one line a check; code 1 if it can't."""
    from deploy.doctor import doctor

    doctor(_with_model(settings))


app.command("up")(command(ClusterSettings, _up))
app.command("doctor")(command(ClusterSettings, _doctor))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, GGUF file or Hugging Face id.")],
) -> None:
    """Serve a model with one worker, as `vllm serve` does. Takes vLLM's flags (docs/from-vllm.md) and `cpd up`'s."""
    from cpd.cli.serve import translated

    with clean_exit():
        arguments = translated(model, context.args)
    typer.main.get_command(app).main(["up", *arguments], prog_name="cpd")


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
def logs(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these processes.")] = None,
    cluster: ClusterName = "default",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the cluster ends.")] = False,
) -> None:
    """Print the log lines of all processes, on all hosts, also of a cluster that has ended."""
    from deploy.logs import print_logs

    with clean_exit():
        print_logs(cluster, names or [], follow)


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
def role(
    name: Annotated[str, typer.Argument(help="Name of the worker, as `cpd status` shows it.")],
    role: Annotated[Role, typer.Argument(help="What the worker prefers to do from now on.")],
    cluster: ClusterName = "default",
) -> None:
    """Change the role of a worker while it runs: `combined` answers requests, `prefill` computes prompts for others."""
    from deploy.role import change_role

    with clean_exit():
        change_role(cluster, name, role)


@app.command()
def models(cluster: ClusterName = "default") -> None:
    """Show the models of the running cluster: which are on their devices, where, and since when."""
    from deploy.model_commands import show_models

    with clean_exit():
        show_models(cluster)


ModelOrWorker = Annotated[str, typer.Argument(metavar="MODEL|WORKER", help="As `cpd models` shows it.")]


@app.command()
def sleep(name: ModelOrWorker, cluster: ClusterName = "default") -> None:
    """Free a model's device memory when its requests have ended; its next request wakes it."""
    from deploy.model_commands import sleep as send_to_sleep

    with clean_exit():
        send_to_sleep(cluster, name)


@app.command()
def wake(name: ModelOrWorker, cluster: ClusterName = "default") -> None:
    """Wake a model that sleeps, as a request would."""
    from deploy.model_commands import wake as wake_model

    with clean_exit():
        wake_model(cluster, name)


@app.command()
def pin(
    name: ModelOrWorker,
    cluster: ClusterName = "default",
    off: Annotated[bool, typer.Option("--off", help="Let others displace it again.")] = False,
) -> None:
    """Keep other models from displacing this one."""
    from deploy.model_commands import pin as pin_model

    with clean_exit():
        pin_model(cluster, name, pinned=not off)


@app.command()
def plan(
    cluster: ClusterName = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan of GET /cluster as JSON.")] = False,
) -> None:
    """Show what the planner sees, predicts and has decided: how many workers prefill."""
    from deploy.plan import show_plan

    with clean_exit():
        show_plan(cluster, as_json)


@app.command()
def scale(
    cluster: ClusterName = "default",
    combined: Annotated[int | None, typer.Option("--combined", min=1, help="Number of combined workers.")] = None,
    prefill: Annotated[int | None, typer.Option("--prefill", min=0, help="Number of prefill workers.")] = None,
    routers: Annotated[int | None, typer.Option("--routers", min=1, help="Number of routers.")] = None,
    model: Annotated[
        str, typer.Option("--model", help="Name of the model whose workers are meant, if the cluster has several.")
    ] = "",
) -> None:
    """Change the numbers of workers and routers while the cluster runs. What goes ends its requests first."""
    from deploy.remote import change

    with clean_exit():
        if combined is prefill is routers is None:
            raise ConfigError("say how many there shall be: --combined, --prefill, --routers")
        change(cluster, "scale", {"combined": combined, "prefill": prefill, "router": routers, "model": model})


@app.command()
def restart(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these processes.")] = None,
    cluster: ClusterName = "default",
) -> None:
    """Restart workers and routers one after the other, with the config file as it is now, without failing requests."""
    from deploy.remote import change

    with clean_exit():
        change(cluster, "restart", {"names": names or []})


@app.command()
def down(cluster: ClusterName = "default") -> None:
    """Stop the running cluster, or remove what is left of one whose `cpd up` was killed."""
    from deploy.remote import down as stop

    with clean_exit():
        stop(cluster)


def main() -> None:
    """Entry point of the console script."""
    app()

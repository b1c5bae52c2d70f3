"""The `cpd profile` commands: measure a device, and show what follows."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpd.common.options import clean_exit, command
from cpd.common.process import switch_threads_often
from cpd.common.settings import ModelSettings
from engine.profile.settings import BudgetSettings, ProfileSettings, SplitSettings

if TYPE_CHECKING:
    from engine.profile.plots import Plot

app = typer.Typer(rich_markup_mode=None)


def _profile(settings: ProfileSettings) -> None:
    """Measure how long a model's steps take on this device, and write its profile."""
    from rich.console import Console

    checkpoint = _checkpoint(settings)

    from engine.profile.plots import profile_plots
    from engine.profile.report import show_profile
    from engine.profile.run import run_profile

    with _progress() as on_progress:
        profile, samples = run_profile(settings, checkpoint, on_progress)
    profile.save(settings.output)
    show_profile(profile, Console())
    _write_page("Profile", f"{profile.model} on {profile.device}", profile_plots(profile, samples), settings.html_file)


def _budget(settings: BudgetSettings) -> None:
    """Compare token budgets: prefill speed against gaps between tokens."""
    from rich.console import Console

    checkpoint = _checkpoint(settings)

    from engine.profile.plots import budget_plot
    from engine.profile.report import show_budget
    from engine.profile.run import run_budget

    with _progress() as on_progress:
        sweep = run_budget(settings, checkpoint, on_progress)
    show_budget(sweep, Console())
    _write_page("Token budget", f"{sweep.prompt} tokens beside decodes", [budget_plot(sweep)], settings.html_file)


def _split(settings: SplitSettings) -> None:
    """Compare splits of the device into prefill and decode lanes."""
    from rich.console import Console

    from cpd.performance.model import Profile
    from engine.profile.report import show_splits
    from engine.profile.splits import split_table

    table = split_table(
        Profile.load(settings.profile),
        prompt=settings.prompt,
        decodes=settings.decodes,
        context=settings.context,
        itl_ms=settings.itl_ms,
        prepared=settings.prepared,
    )
    show_splits(table, Console())


def _unless_subcommand(measure: Callable[..., None]) -> Callable[..., None]:
    """Returns a callback that measures, unless a subcommand such as `cpd profile show` was given."""

    def callback(context: typer.Context, **flags: Any) -> None:
        if context.invoked_subcommand is None:
            measure(**flags)

    own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [own, *inspect.signature(measure).parameters.values()]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__doc__ = measure.__doc__
    return callback


app.callback(invoke_without_command=True)(_unless_subcommand(command(ProfileSettings, _profile)))
app.command("budget")(command(BudgetSettings, _budget))
app.command("split")(command(SplitSettings, _split))


@app.command()
def show(
    profile: Annotated[Path, typer.Argument(help="File, or name of a bundled profile.")] = Path("profile.json"),
) -> None:
    """Show a profile: its source, accuracy and predictions."""
    from rich.console import Console

    from cpd.performance.model import Profile
    from engine.profile.report import show_profile

    with clean_exit():
        show_profile(Profile.load(profile), Console())


def _checkpoint(settings: ModelSettings) -> Path:
    """Returns the model to measure. Call it before importing torch, which reads the variable it sets."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in workers
    switch_threads_often()
    from deploy.model import resolve_model
    from models import tiny

    return resolve_model(settings.model or str(tiny.CHECKPOINT))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Shows a progress bar for each part of the measurement."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        tasks = {}

        def on_progress(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=1.0)
            progress.update(tasks[what], completed=share)

        yield on_progress


def _write_page(title: str, subtitle: str, plots: "Sequence[Plot]", path: Path | None) -> None:
    if path is None:
        return
    from bench.report.page import Chart, Page

    page = Page(title, subtitle)
    page.add(*(Chart(plot.title, plot.traces, plot.layout, plot.note) for plot in plots))
    page.write(path)

"""`cpd sim models`: simulates many models on few devices with several policies and seeds."""

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, Field
from rich import box
from rich.console import Console
from rich.table import Table

from bench.report.text import number, percent
from bench.result import write_json
from bench.run import command_line
from cpd.common.errors import ConfigError
from sim.evidence import evidence
from sim.models.fleet import SimulatedModel, make_fleet
from sim.models.settings import ModelsSettings
from sim.models.simulation import Outcome, make_policy, simulate
from sim.models.workload import lengths

_NOTE = (
    "Good: requests whose first token and mean time between tokens are within --slo-ttft and --slo-itl. Ratio: of the "
    "goodput to that of lru-swap. Longest wait: of a request until its model is awake, pauses included. Jain: Jain's "
    "index of the models' shares of good requests; 1 if all are equal. Means over the seeds; the longest wait of all."
)
_MODELS_NOTE = (
    "Waits of each model's requests until it is awake, in seconds: median / 99th percentile / longest. Means over the "
    "seeds; the longest wait of all."
)


class Results(BaseModel):
    """The content of the `--json` file."""

    schema_: Literal["cpd-sim-models/1"] = Field("cpd-sim-models/1", alias="schema")
    simulated: Literal[True] = True
    evidence: str
    command: list[str]
    settings: dict[str, Any]
    outcomes: list[Outcome]


def run(settings: ModelsSettings) -> None:
    """Simulates, writes the file and prints the tables.

    Raises:
        CPDError: A setting or the file of models is invalid, or a file cannot be written.
    """
    fleet = make_fleet(settings)
    policies = [name.strip() for name in settings.policies.split(",")]
    for name in policies:
        make_policy(name, fleet)
    seeds = _seeds(settings.seeds)
    lengths(settings)
    outcomes = []
    messages = Console(stderr=True)
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        jobs = list(product(seeds, policies))
        for one in pool.map(_job, [(settings, policy, seed) for seed, policy in jobs]):
            messages.print(f"seed {one.seed}, {one.policy}: {percent(one.good_share)} of {one.requests} requests good")
            outcomes.append(one)
    if settings.json_file:
        found = Results(
            schema="cpd-sim-models/1",
            evidence=evidence(settings.profile),
            command=command_line(sys.argv),
            settings=settings.model_dump(mode="json"),
            outcomes=outcomes,
        )
        write_json(found, settings.json_file)
    console = Console()
    _show_policies(policies, outcomes, console)
    _show_models(policies, fleet, outcomes, console)
    console.print(f"The figures are {evidence(settings.profile)}.")


def _job(arguments: tuple[ModelsSettings, str, int]) -> Outcome:
    return simulate(*arguments)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0:
        raise ConfigError("--seeds takes whole numbers from 0, separated by commas")
    return seeds


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _show_policies(policies: Sequence[str], outcomes: Sequence[Outcome], console: Console) -> None:
    by_policy = {name: [one for one in outcomes if one.policy == name] for name in policies}
    base = fmean([one.good_per_s for one in by_policy["lru-swap"]]) if "lru-swap" in by_policy else 0.0
    table = _table(["Policy", "Good/s", "Ratio", "Good", "Swaps/h", "Longest wait, s", "Jain"])
    for name, some in by_policy.items():
        good_per_s = fmean(one.good_per_s for one in some)
        table.add_row(
            name,
            number(good_per_s),
            f"x {good_per_s / base:.2f}" if base else "-",
            percent(fmean(one.good_share for one in some)),
            number(fmean(one.swaps_per_hour for one in some)),
            number(max((one.longest_wait_s for one in some if one.longest_wait_s is not None), default=None)),
            f"{fmean(one.jain for one in some):.3f}",
        )
    console.print(table, _NOTE)


def _show_models(
    policies: Sequence[str], fleet: Sequence[SimulatedModel], outcomes: Sequence[Outcome], console: Console
) -> None:
    table = _table(["Model", "Device", "GiB", "Requests", *policies])
    for index, model in enumerate(fleet):
        cells = [_waits([one for one in outcomes if one.policy == name], index) for name in policies]
        table.add_row(
            model.spec.name,
            str(model.device),
            f"{model.spec.memory_bytes / 2**30:.0f}",
            percent(model.share),
            *cells,
        )
    console.print(table, _MODELS_NOTE)


def _waits(outcomes: Sequence[Outcome], index: int) -> str:
    """Returns the waits of a model, or that its requests failed."""
    models = [one.models[index] for one in outcomes]
    p50 = [one.wait_p50_s for one in models if one.wait_p50_s is not None]
    p99 = [one.wait_p99_s for one in models if one.wait_p99_s is not None]
    longest = [one.wait_longest_s for one in models if one.wait_longest_s is not None]
    if not p50:
        return "failed" if any(one.failed for one in models) else "-"
    return f"{fmean(p50):.1f} / {fmean(p99):.1f} / {max(longest):.1f}"

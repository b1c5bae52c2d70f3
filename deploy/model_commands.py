"""`cpd models`, `sleep`, `wake` and `pin`: the models of a running cluster, and which of them are on their devices."""

import sys
import time
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpd.common.errors import CPDError
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster
from worker.admin_calls import AdminCall, pin_worker, sleep_worker, wake_worker

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def show_models(cluster: str) -> None:
    """Prints the models with their workers.

    Raises:
        CPDError: No cluster of this name is running, or its router does not answer.
    """
    Console().print(models_table(read_cluster(running_cluster(cluster)), time.time()))


def sleep(cluster: str, name: str) -> None:
    """Sends a model, or one of its workers, to sleep.

    Raises:
        CPDError: There is no such cluster, model or worker, its device is not shared, or it does not answer.
    """
    outcome = "goes to sleep when its requests have ended, or are parked after its drain timeout"
    _tell(cluster, name, sleep_worker, outcome)


def wake(cluster: str, name: str) -> None:
    """Wakes a model, or one of its workers, as a request would.

    Raises:
        CPDError: As for `sleep`.
    """
    _tell(cluster, name, wake_worker, "wakes when it is its turn; `cpd models` shows until when")


def pin(cluster: str, name: str, *, pinned: bool) -> None:
    """Pins a model, or one of its workers, or ends that: while pinned no other model may displace it.

    Raises:
        CPDError: As for `sleep`.
    """
    outcome = "is pinned: no other model displaces it" if pinned else "is no longer pinned"
    _tell(cluster, name, partial(pin_worker, pinned=pinned), outcome)


def models_table(answer: dict[str, Any], now: float) -> Table:
    """Returns a table of the models in a `/cluster` answer, a row for each worker, at a time in seconds since 1970."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("worker", overflow="fold")
    table.add_column("where", overflow="fold")
    table.add_column("since", no_wrap=True, justify="right")
    for model in answer["models"]:
        workers = [one for one in answer["workers"] if one["model"] == model["name"]]
        shown = model["name"]
        for worker in workers:
            residency = worker.get("residency")
            since = _duration(now - residency["since"]) if residency else ""
            cells = (shown, _state(worker), worker["id"], worker["host"], since)
            table.add_row(*map(Text, cells))
            shown = ""  # the model is the same
        if not workers:
            table.add_row(*map(Text, (shown, "no worker")))
    return table


def _state(worker: dict[str, Any]) -> str:
    residency = worker.get("residency")
    if worker["state"] != "ready" or not residency:
        return "serving" if worker["state"] == "ready" else str(worker["state"])
    state: str = residency["state"]
    if residency["serves_in_s"]:
        state += f", serves within {residency['serves_in_s']:.0f} s"
    return state + (", pinned" if residency["pinned"] else "")


def _duration(seconds: float) -> str:
    for unit_s, unit in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _tell(cluster: str, name: str, call: AdminCall, outcome: str) -> None:
    """Calls the workers that a name stands for, and prints the outcome for each.

    Raises:
        CPDError: There are none, or a call failed.
    """
    state = running_cluster(cluster)
    errors = []
    for worker in named(read_cluster(state), name, cluster):
        try:
            call(worker["id"], worker["address"], state.admin_key)
        except CPDError as error:
            errors.append(str(error))
        else:
            sys.stdout.write(f"{worker['id']} {outcome}.\n")
    if errors:
        raise CPDError("; ".join(errors))


def named(answer: dict[str, Any], name: str, cluster: str) -> list[dict[str, Any]]:
    """Returns the worker of this name in a `/cluster` answer, or the workers of the model.

    Raises:
        CPDError: There are none whose device is shared.
    """
    models = [one["name"] for one in answer["models"] if name in (one["name"], *one["aliases"])]
    workers = [one for one in answer["workers"] if one["id"] == name]
    workers = workers or [one for one in answer["workers"] if one["model"] in models]
    if not workers and models:
        raise CPDError(f"no worker of the model {models[0]!r} runs")
    if not workers:
        there = ", ".join(one["name"] for one in answer["models"])
        names = ", ".join(one["id"] for one in answer["workers"]) or "none"
        raise CPDError(f"cluster '{cluster}' has no model or worker {name!r}; models: {there}; workers: {names}")
    shared = [one for one in workers if one.get("residency")]
    if not shared:
        raise CPDError(f"{name} has its device for itself, so it never sleeps; devices are shared with --device-memory")
    return shared

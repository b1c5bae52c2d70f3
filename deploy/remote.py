"""`cpd status`, `down`, `scale` and `restart`, for a cluster that runs in the background or in another terminal."""

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpd.common.errors import CPDError
from deploy.cluster_status import read_cluster
from deploy.control import ask
from deploy.state import ClusterDir, ClusterState, running_clusters
from simulated_workers.simulation import NOTICE, SIMULATED

_DOWN_S = 20.0
_NAME_WIDTH = 10
"""Width of a worker's name to which it is folded, in characters."""


def down(cluster: str) -> None:
    """Stops the cluster and waits for its end.

    Raises:
        CPDError: No cluster of this name is running, or it does not end.
    """
    directory = ClusterDir(cluster)
    if directory.read() is None and directory.clean_up():
        sys.stdout.write(f"Cluster '{cluster}' is down. Its `cpd up` had been killed; what was left is removed.\n")
        return
    state = _held_cluster(cluster)
    deadline = time.monotonic() + _DOWN_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    while (left := directory.read()) and left.pid == state.pid:
        if time.monotonic() > deadline:
            raise CPDError(
                f"`cpd up` (process {state.pid}) has not ended after {_DOWN_S:.0f} s. `kill -9 {state.pid}` ends it and"
                " its processes; `cpd down` then removes the files that are left"
            )
        time.sleep(0.1)
    directory.clean_up()  # it may have been killed meanwhile
    sys.stdout.write(f"Cluster '{cluster}' is down.\n")


def change(cluster: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Asks for a change of the cluster, and prints its steps.

    Raises:
        CPDError: No cluster of this name is running, or the change fails.
    """
    running_cluster(cluster)
    console = Console(stderr=True)
    ask(
        ClusterDir(cluster).control_socket,
        name,
        arguments,
        lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )


def status(cluster: str, as_json: bool) -> None:
    """Prints the cluster's workers with their state, load and cache.

    Raises:
        CPDError: No cluster of this name is running, or its router does not answer.
    """
    state = running_cluster(cluster)
    directory = ClusterDir(cluster)
    drained, missing = directory.drained(), [f"{name}: {reason}" for name, reason in directory.missing().items()]
    try:
        answer = read_cluster(state)
    except CPDError as error:
        if drained:
            missing.append(f"`cpd drain` has ended {', '.join(drained)}")
        raise CPDError(". ".join([str(error), *missing])) from None
    if as_json:
        sys.stdout.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    console = Console()
    names = ", ".join(one["name"] for one in answer.get("models", [])) or answer["model"]  # of an older router
    console.print(f"Cluster '{cluster}' serves {names} at {state.url}", highlight=False, markup=False)
    if any(worker["info"] and worker["info"]["transport"] == SIMULATED for worker in answer["workers"]):
        console.print(NOTICE)
    for line in devices(answer):
        console.print(line, style="dim", markup=False, highlight=False)
    console.print(cluster_table(answer, drained))
    for line in machines(answer):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    for line in (*reasons(answer), *missing):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not answer["redis"]["ok"]:
        console.print(f"Redis does not answer: {answer['redis']['error']}", markup=False)


def running_cluster(cluster: str) -> ClusterState:
    """Returns the running cluster of this name.

    Raises:
        CPDError: There is none on this machine, or it only starts.
    """
    state = _held_cluster(cluster)
    if not state.url:
        raise CPDError(f"cluster '{cluster}' only starts: its `cpd up` still checks or downloads its models")
    return state


def _held_cluster(cluster: str) -> ClusterState:
    """Returns the cluster of this name, also one that only starts."""
    state = ClusterDir(cluster).read()
    if state is None:
        others = running_clusters()
        hint = f"there are: {', '.join(others)} (choose with --cluster)" if others else "start one with `cpd up`"
        raise CPDError(f"no cluster '{cluster}' is running on this machine; {hint}")
    return state


def devices(answer: dict[str, Any]) -> list[str]:
    """Returns a line for each kind of device in a `/cluster` answer, the most common first."""
    kinds = Counter(worker["info"]["device"] for worker in answer["workers"] if worker["info"])
    return [f"{count} x {kind}" for kind, count in kinds.most_common()]


def machines(answer: dict[str, Any]) -> list[str]:
    """Returns a line for each machine in a `/cluster` answer, with its processes; none if there is only one."""
    names: dict[str, list[str]] = {}
    for process in (*answer["workers"], *answer["routers"]):
        names.setdefault(process["host"], []).append(process["id"])
    return [f"{host}: {', '.join(here)}" for host, here in sorted(names.items())] if len(names) > 1 else []


def reasons(answer: dict[str, Any]) -> list[str]:
    """Returns a line for each worker in a `/cluster` answer that can't be used, with the reason."""
    return [f"{worker['id']}: {worker['reason']}" for worker in answer["workers"] if worker["reason"]]


def cluster_table(answer: dict[str, Any], drained: Sequence[str] = ()) -> Table:
    """Returns a table of the workers in a `/cluster` answer, and of processes that were drained and have ended.

    On a narrow terminal long names are folded, and nothing else.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worker", overflow="fold", min_width=_NAME_WIDTH)
    table.add_column("state", no_wrap=True)
    for heading in ("running", "waiting", "tokens", "pages: free", "cached", "used", "other"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in answer["workers"]:
        load, state, cells = worker["load"], worker["state"], []
        if (residency := worker.get("residency")) and residency["state"] != "serving":
            state += f", {residency['state']}"
        if load:
            pages = load["pages"]
            cells = [load["running"], load["waiting"], load["waiting_tokens"], pages["free"], pages["cached"]]
            cells += [pages["used"], pages["reserved"] + pages["quarantined"]]
        own_name = worker["id"].removeprefix(f"{worker.get('model', '')}-")
        role = "" if own_name.startswith(worker["role"]) else f" ({worker['role']})"
        table.add_row(Text(worker["id"] + role), Text(state), *(f"{cell:,}" for cell in cells))
    for name in drained:
        if all(one["id"] != name for one in (*answer["workers"], *answer["routers"])):
            table.add_row(Text(name), Text("drained"))
    return table

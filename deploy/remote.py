"""`cpd status` and `cpd down`: what another terminal can do with a running cluster."""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from cpd.errors import CPDError
from deploy.endpoint import read_cluster
from deploy.state import ClusterDir, ClusterState

_DOWN_S = 20.0


def down(cluster: str) -> None:
    """Stops the cluster and waits until nothing of it is left.

    Raises:
        CPDError: There is none of that name, or it does not end.
    """
    state = _running(cluster)
    deadline = time.monotonic() + _DOWN_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    while ClusterDir(cluster).read() == state:
        if time.monotonic() > deadline:
            raise CPDError(f"`cpd up` (process {state.pid}) has not ended after {_DOWN_S:.0f} s")
        time.sleep(0.1)
    sys.stdout.write(f"Cluster '{cluster}' is down.\n")


def status(cluster: str, as_json: bool) -> None:
    """Prints workers, roles, load and cache of the cluster.

    Raises:
        CPDError: There is none of that name, or its router does not answer.
    """
    state = _running(cluster)
    answer = read_cluster(state.url, state.api_key)
    if as_json:
        sys.stdout.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    Console().print(f"Cluster '{cluster}' at {state.url}", _table(answer), sep="\n")


def _running(cluster: str) -> ClusterState:
    state = ClusterDir(cluster).read()
    if state is None:
        raise CPDError(f"no cluster '{cluster}' is running on this machine; start one with `cpd up`")
    return state


def _table(answer: dict[str, Any]) -> Table:
    """The workers of a `/cluster` answer."""
    return Table()

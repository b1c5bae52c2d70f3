"""`cpd drain`: lets a worker or router of a running cluster finish what it does, and end for good."""

import socket
import sys
import time
from typing import Any

import httpx2
import psutil

from cpd.common.errors import CPDError
from cpd.common.tls import base_url, without_fingerprint
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster
from deploy.state import ClusterDir, ClusterState
from worker.admin_calls import drain_worker

_TIMEOUT_S = 10.0
_POLL_S = 0.25
_SILENT_S = 30.0
"""Time for which the endpoint may not answer, in seconds."""


def drain(cluster: str, name: str, timeout_s: float | None) -> None:
    """Drains the worker or router and shows what still runs there until it has ended.

    Args:
        timeout_s: Time for running requests to end by themselves; None: the process's `--drain-s`.

    Raises:
        CPDError: There is no such cluster or process, it does not answer, or it crashed meanwhile.
    """
    state = running_cluster(cluster)
    admin_key = state.admin_key
    status = read_cluster(state)
    processes = {one["id"]: one for one in (*status["workers"], *status["routers"])}
    if name not in processes:
        names = ", ".join(processes) or "none"
        raise CPDError(f"no worker or router {name!r} runs in cluster '{cluster}'; there are: {names}")
    process = processes[name]
    if process in status["routers"]:
        _drain_router(name, process["admin"], admin_key, timeout_s)
    else:
        drain_worker(name, process["address"], admin_key, timeout_s)
    shown, silent_since = "", None
    while True:
        try:
            what, silent_since = _still_runs(state, process), None
        except _NoAnswerError as error:  # the last router takes no connections while it drains
            if process["host"] == socket.gethostname():
                what = shown if psutil.pid_exists(process["pid"]) else None
            else:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > _SILENT_S:
                    raise CPDError(f"{name} drains, but whether it has ended is not known: {error}") from None
                what = shown
        if what is None:
            break
        if what != shown:
            sys.stdout.write(f"{name} drains: {what}\n")
            sys.stdout.flush()
            shown = what
        time.sleep(_POLL_S)
    ClusterDir(cluster).add_drained(name)
    sys.stdout.write(f"{name} has ended.\n")


def _drain_router(name: str, admin: str, admin_key: str, timeout_s: float | None) -> None:
    query = {} if timeout_s is None else {"timeout_s": timeout_s}
    headers = {"authorization": f"Bearer {admin_key}"}
    try:
        url, verify = base_url(admin)
        answer = httpx2.post(
            f"{url}/drain", params=query, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=verify
        )
        answer.raise_for_status()
    except httpx2.HTTPStatusError as error:
        raise CPDError(f"router {name} refuses: {error.response.status_code} {error.response.text}") from None
    except (httpx2.HTTPError, OSError) as error:
        raise CPDError(f"router {name} at {without_fingerprint(admin)} does not answer: {error}") from None


class _NoAnswerError(Exception):
    """The endpoint does not answer."""


def _still_runs(state: ClusterState, process: dict[str, Any]) -> str | None:
    """Returns what the process still does, for people; None once it has ended.

    Raises:
        CPDError: It crashed and was started again.
        _NoAnswerError: The endpoint does not answer.
    """
    try:
        status = read_cluster(state)
    except CPDError as error:
        raise _NoAnswerError(str(error)) from None
    now = next((one for one in (*status["workers"], *status["routers"]) if one["id"] == process["id"]), None)
    if now is None:
        return None
    if now["incarnation"] != process["incarnation"]:
        raise CPDError(f"{process['id']} crashed while it drained, and was started again: drain it again")
    load = now.get("load")
    return f"{load['running']} running, {load['waiting']} waiting" if load else "it serves what it has"

"""Starts processes of a cluster in a second instead of ten, by forking one that has already imported everything.

`python -m tests.faults.fork_server` forks a process for each line of JSON on its standard input,
{"program", "arguments", "namespace", "log", "core"}, and answers with its process id. Its children die with it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
PROGRAMS = ("router.__main__", "tests.faults.worker")


class ForkServer:
    """Starts a fork server and sends it requests."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server"],
            cwd=directory,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process ID of the fork server."""
        return self._process.pid

    def start(self, program: str, arguments: list[str], *, namespace: str, log: Path, core: int) -> int:
        """Starts `python -m program arguments`; returns its process id.

        Args:
            namespace: Network namespace; empty for this process's own.
            log: File to which its standard output and error are appended.
            core: The CPU core it runs on.
        """
        request = {"program": program, "arguments": arguments, "namespace": namespace, "log": str(log), "core": core}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the fork server and every process it has started."""
        self._process.kill()
        self._process.communicate()


def run_child(request: dict[str, Any]) -> None:
    """Runs a program in the forked process; never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.sched_setaffinity(0, {request["core"]})
    if request["namespace"]:
        with open(f"/run/netns/{request['namespace']}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter namespace {request['namespace']}")
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [request["program"], *request["arguments"]]
    sys.modules[request["program"]].main()


def main() -> None:
    """Forks until standard input ends."""
    for program in PROGRAMS:
        __import__(program)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped without a wait
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                run_child(json.loads(line))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()

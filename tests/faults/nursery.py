"""Processes of a cluster, started in a second instead of ten: forked from one that has imported everything.

`python -m tests.faults.nursery` forks a process for each line of JSON on its standard input,
{"program", "arguments", "namespace", "log", "core"}, and answers with its process id. Its children end with it.
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


class Nursery:
    """The process that forks, from outside."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            cwd=directory,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, program: str, arguments: list[str], *, namespace: str, log: Path, core: int) -> int:
        """Starts `python -m program arguments`; returns its process id.

        Args:
            namespace: Of the network; empty: this process's own.
            log: Its standard output and error are added there.
            core: The one it runs on.
        """
        order = {"program": program, "arguments": arguments, "namespace": namespace, "log": str(log), "core": core}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it, and every process that it has started."""
        self._process.kill()
        self._process.communicate()


def become(order: dict[str, Any]) -> None:
    """In a new process: never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.sched_setaffinity(0, {order["core"]})
    if order["namespace"]:
        with open(f"/run/netns/{order['namespace']}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no way into {order['namespace']}")
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [order["program"], *order["arguments"]]
    sys.modules[order["program"]].main()


def main() -> None:
    """Forks until its standard input ends."""
    for program in PROGRAMS:
        __import__(program)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                become(json.loads(line))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()

"""The temporary directory of a local Ray, and making sure that nothing of it is left."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

_ENDING_S = 3.0


def make_ray_dir() -> str:
    """A private directory with a short name: below XDG_RUNTIME_DIR paths may be too long for Ray's sockets."""
    return tempfile.mkdtemp(prefix="cpd-ray-", dir="/tmp")


def clear_ray_dir(directory: str) -> None:
    """Removes the directory, and whatever of Ray is still running there.

    Ray takes down what it has started only when its start was complete, and its agents outlive its other processes when
    those are killed.
    """
    deadline = time.monotonic() + _ENDING_S
    while (users := _users(directory)) and time.monotonic() < deadline:
        for pid in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


def _users(directory: str) -> set[int]:
    """Other processes that have files open there."""
    users = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if os.readlink(link).startswith(f"{directory}/"):
                users.add(int(link.parts[2]))
    return users - {os.getpid()}

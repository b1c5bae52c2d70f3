"""The temporary directory of a local Ray, and its clean-up."""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_ENDING_S = 3.0


def make_ray_dir() -> str:
    """Makes a private directory. Its name is short, because socket paths must be."""
    return tempfile.mkdtemp(prefix="cpd-ray-", dir="/tmp")


@contextlib.contextmanager
def protected(directory: str | Path) -> Iterator[None]:
    """Keeps old files there: systemd-tmpfiles removes them from /tmp after some days, but skips locked directories."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def clear_ray_dir(directory: str) -> None:
    """Kills the processes of Ray that still use the directory, and removes it.

    Ray does not clean up after an incomplete start, and its agents outlive its other processes if those are killed.
    """
    deadline = time.monotonic() + _ENDING_S
    while (users := _users(directory)) and time.monotonic() < deadline:
        for pid in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


def _users(directory: str) -> set[int]:
    """Returns other processes with open files there."""
    users = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.readlink(link).startswith(f"{directory}/"):
                users.add(int(link.parts[2]))
    return users - {os.getpid()}

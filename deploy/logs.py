"""The log of a cluster on disk, which `cpd up` writes and `cpd logs` reads.

One file holds the lines of all processes, of other hosts too, each after its process's name and a tab. It is rotated,
outlives the cluster, and belongs to `cpd up`: workers and routers write to their standard error only.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from cpd.common.errors import CPDError
from deploy.state import ClusterDir

FILE_BYTES, OLD_FILES = 16 << 20, 4
LAUNCHER = "cpd-up"
"""Name under which `cpd up` itself logs."""
_POLL_S = 0.2


def log_file(cluster: str) -> Path:
    """Returns the newest file of a cluster's log; older ones have `.1` (newer) to `.4` (oldest) added.

    It is below `$XDG_STATE_HOME` (`~/.local/state`), or in /tmp if that can't be written.
    """
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    writable = next(folder for folder in (base, *base.parents) if folder.exists())
    if not os.access(writable, os.W_OK):
        base = Path(f"/tmp/cpd-{os.getuid()}-logs")
    return base / "cpd" / cluster / "cluster.log"


class ClusterLog:
    """Writes a cluster's log. If the disk is full, lines are lost and the cluster goes on.

    Raises:
        CPDError: The file can't be made.
    """

    def __init__(self, cluster: str) -> None:
        self.path = log_file(cluster)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.parent.chmod(0o700)
            self._file = _File(self.path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, errors="replace")
        except OSError as error:
            raise CPDError(f"cannot write the log {self.path}: {error.strerror}") from None

    def write(self, name: str, lines: Iterable[str]) -> None:
        """Appends lines of the process `name`; a text with several lines is several."""
        for line in (line for text in lines for line in text.split("\n")):
            self._file.handle(logging.makeLogRecord({"msg": f"{name}\t{line}"}))

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            self._file.close()


def print_logs(cluster: str, names: list[str], follow: bool) -> None:
    """Prints the log of a cluster, which may have ended.

    Args:
        names: Only these processes; empty: all.
        follow: Print new lines, too, until the cluster ends.

    Raises:
        CPDError: There is no log, or it has no lines of one of the processes.
    """
    directory, path = ClusterDir(cluster), log_file(cluster)
    if not path.exists():
        raise CPDError(f"cluster '{cluster}' has no log: there is no {path}")
    seen: set[str] = set()
    try:
        for name, line in read_log(path, lambda: follow and directory.read() is not None):
            seen.add(name)
            if not names or name in names:
                sys.stdout.write(f"{line}\n")
                if follow:
                    sys.stdout.flush()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if missing := sorted(set(names) - seen):
        raise CPDError(f"the log has no lines of {', '.join(missing)}; it has lines of {', '.join(sorted(seen))}")


def read_log(path: Path, follow: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """Yields process name and line of all lines on disk, then new ones for as long as `follow()` is true."""
    with ExitStack() as stack:
        files = []
        for file in (*(path.with_name(f"{path.name}.{age}") for age in range(OLD_FILES, 0, -1)), path):
            if file.exists():
                files.append(stack.enter_context(file.open(errors="replace")))
        for opened in files:
            yield from _split(opened)
        current = files[-1]
        while goes_on := follow():
            yield from _split(current)
            if _is_rotated(current, path):
                yield from _split(current)  # written since
                current = stack.enter_context(path.open(errors="replace"))
            elif goes_on:
                time.sleep(_POLL_S)
        yield from _split(current)


class _File(RotatingFileHandler):
    def _open(self) -> TextIO:  # type: ignore[override]
        return open(self.baseFilename, "a", errors="replace", opener=lambda path, flags: os.open(path, flags, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drops the line."""


def _split(file: TextIO) -> Iterator[tuple[str, str]]:
    """Yields the complete lines from here on."""
    while True:
        before = file.tell()
        text = file.readline()
        if not text.endswith("\n"):  # the end, or a line that is being written
            file.seek(before)
            return
        name, _, line = text.rstrip("\n").partition("\t")
        yield name, line


def _is_rotated(file: TextIO, path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino != path.stat().st_ino
    except FileNotFoundError:  # between two names
        return False

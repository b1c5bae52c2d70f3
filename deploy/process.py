"""One supervised child process: started, restarted when it dies, ended with its supervisor.

    starting ──▶ running ──▶ (died) waiting ──▶ running …
                    └─────── stop() ──────────▶ stopped

The child's standard input is a pipe that closes with this process, however it ends (`cpd.common.process`); its log
lines come over its standard error. One thread owns the child; it runs on the child's cores, which the child inherits.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cpd.common.errors import CPDError

log = logging.getLogger(__name__)

KEPT_LINES = 1000
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A child that lived this long starts again without delay."""
STOP_S = 4.0
"""A child has this long to end in order."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the supervisor knows about its child.

    Attributes:
        host: Where it is.
        pid: Of the running child, None between two.
        starts: How often it was started.
        error: The sentence with which the last child that ended refused to start (`error: …`, exit code 1).
        exit_code: Of the last child that ended, negative for a signal.
        lines: Log lines from the asked-for number on.
        next_line: Number of the line that comes next.
    """

    host: str
    pid: int | None
    starts: int
    error: str | None
    exit_code: int | None
    lines: list[str]
    next_line: int


class Supervised:
    """Keeps one command running from construction until `stop`.

    Args:
        command: Gives program and arguments; called before every start, on the thread that owns the child. A CPDError
            that it raises counts as a failed start.
        environment: The child's whole environment.
        cores: CPUs the child may run on; empty leaves it all.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        cores: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self._command = command
        self._environment = {**environment, "CPD_SUPERVISED": "1"}
        self._cores = cores
        self._lock = threading.Lock()  # guards everything below
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lines_seen = 0
        self._starts = 0
        self._error: str | None = None
        self._exit_code: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervise-{name}", daemon=True)
        self._thread.start()

    def state(self, from_line: int = 0) -> ProcessState:
        """A snapshot, with the kept log lines from number `from_line` on (all, when there is no such line yet)."""
        with self._lock:
            if from_line > self._lines_seen:  # the caller has counted another supervisor's lines
                from_line = 0
            child, kept_from = self._child, self._lines_seen - len(self._lines)
            return ProcessState(
                host=socket.gethostname(),
                pid=child.pid if child else None,
                starts=self._starts,
                error=self._error,
                exit_code=self._exit_code,
                lines=list(self._lines)[max(0, from_line - kept_from) :],
                next_line=self._lines_seen,
            )

    def stop(self) -> None:
        """Ends the child, by force where it takes longer than STOP_S. Idempotent; returns when it is gone."""
        self._stopping.set()
        for end, wait_s in ((subprocess.Popen.terminate, STOP_S), (subprocess.Popen.kill, None)):
            with self._lock:
                child = self._child
            if child:
                end(child)
            self._thread.join(wait_s)

    def _run(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread
        delay_s = 0.0
        while not self._stopping.wait(delay_s):
            started = time.monotonic()
            self._run_once()
            lived_s = time.monotonic() - started
            delay_s = 0.0 if lived_s > STEADY_S else min(max(FIRST_DELAY_S, 2 * delay_s), LONGEST_DELAY_S)

    def _run_once(self) -> None:
        """Starts the child and returns when it has ended."""
        try:
            command = list(self._command())
            child = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the supervisor; and what it starts ends with it
            )
        except CPDError as error:
            self._ended(None, str(error))
            return
        except OSError as error:
            self._ended(None, f"cannot start {command[0]}: {error.strerror}")
            return
        with self._lock:
            self._child = child
            self._starts += 1
        if self._stopping.is_set():  # stop() may not have seen it
            child.terminate()
        end = threading.Thread(target=_end_what_it_started, args=(child.pid,), name=f"end-{self.name}", daemon=True)
        end.start()
        sentence = None
        assert child.stderr is not None
        assert child.stdin is not None
        for line in child.stderr:
            if line.startswith("error: "):
                sentence = line.removeprefix("error: ").strip()
            with self._lock:
                self._lines.append(line.rstrip("\n"))
                self._lines_seen += 1
        end.join()
        code = child.wait()
        for pipe in (child.stderr, child.stdin):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._ended(code, sentence if code == 1 else None)

    def _ended(self, code: int | None, error: str | None) -> None:
        with self._lock:
            self._child, self._exit_code, self._error = None, code, error
        if not self._stopping.is_set():
            log.warning("%s ended with code %s, starting it again", self.name, code)


def _end_what_it_started(child: int) -> None:
    """When a child ends: a compiler would go on for minutes, and keep the child's standard error open for as long."""
    with contextlib.suppress(ChildProcessError):  # `stop` may have seen its end first
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)

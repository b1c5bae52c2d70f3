"""One supervised child process: restarted when it dies, ended with its supervisor.

    starting ──▶ running ──▶ (died) waiting ──▶ running …
                    └─ stop(), superseded, drained ──▶ stopped

The child's standard input is a pipe that closes when this process ends (`cpd.common.process`); its log comes from its
standard error. One thread owns the child and runs on the child's cores, so that the child inherits them.
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
from pathlib import Path

from cpd.common.errors import CPDError
from cpd.common.process import AGAIN_S, EXIT_DRAINED, EXIT_SUPERSEDED
from deploy.listener import SharedListener
from router.listener import LISTENER_FD

log = logging.getLogger(__name__)

MAX_LOG_LINES = 10_000
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A child that lived this long restarts without delay."""
STOP_S = 4.0
"""Time that a child has to end in order."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A supervisor's report about its child.

    Attributes:
        host: Name of the machine.
        pid: Process id; None while no child runs.
        starts: Number of starts so far.
        error: Why the last child that ended refused to start (`error: …`, exit code 1), or is not started again.
        exit_code: Exit code of the last child that ended, negative for a signal.
        lines: Log lines from the requested number on.
        next_line: Number of the next log line.
    """

    host: str
    pid: int | None
    starts: int
    error: str | None
    exit_code: int | None
    lines: list[str]
    next_line: int

    @property
    def has_ended_for_good(self) -> bool:
        """True if the child is not started again: it was drained on request, or a newer process has its id."""
        return self.pid is None and self.exit_code in (EXIT_DRAINED, EXIT_SUPERSEDED)


class Supervised:
    """Keeps one command running from construction until `stop`, or until the child was drained on request or a newer
    process has taken its id.

    Args:
        command: Returns program and arguments. Called before each start, on the thread that owns the child; a CPDError
            counts as a failed start.
        environment: The child's whole environment.
        cores: CPUs that the child may use; empty: all.
        listener: Socket that the child, a router, listens on. This closes it when the child is not started again.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        cores: frozenset[int] = frozenset(),
        listener: SharedListener | None = None,
    ) -> None:
        self.name = name
        self._command = command
        self._environment = {**environment, "CPD_SUPERVISED": "1"}
        self._listener = listener
        self._lock = threading.Lock()  # guards everything below
        self._cores = cores
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._lines_seen = 0
        self._starts = 0
        self._error: str | None = None
        self._exit_code: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervise-{name}", daemon=True)
        self._thread.start()

    def state(self, from_line: int = 0) -> ProcessState:
        """Returns a report with the log lines from number `from_line` on, or all if there is no such line yet."""
        with self._lock:
            if from_line > self._lines_seen:  # it counted the lines of another supervisor
                from_line = 0
            child, first_line = self._child, self._lines_seen - len(self._lines)
            return ProcessState(
                host=socket.gethostname(),
                pid=child.pid if child else None,
                starts=self._starts,
                error=self._error,
                exit_code=self._exit_code,
                lines=list(self._lines)[max(0, from_line - first_line) :],
                next_line=self._lines_seen,
            )

    def use_cores(self, cores: frozenset[int]) -> None:
        """Moves the child to these CPUs now; it keeps its number of threads until it is started again."""
        with self._lock:
            if cores == self._cores:
                return
            self._cores = cores
            threads = Path(f"/proc/{self._child.pid}/task").glob("*") if self._child else ()
        for thread in (self._thread.native_id, *(int(path.name) for path in threads)):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread or 0, cores)

    def drain(self) -> None:
        """Sends SIGTERM once, and returns when the child has ended its requests and is gone; `stop` cuts it short."""
        self._stopping.set()
        with self._lock:
            child = self._child
        if child:
            child.terminate()
        self._thread.join()

    def stop(self) -> None:
        """Ends the child, by force after STOP_S, and returns when it is gone. Idempotent.

        It does not drain: a second SIGTERM follows the first one.
        """
        self._stopping.set()
        terminate, kill = subprocess.Popen.terminate, subprocess.Popen.kill
        for end, wait_s in ((terminate, AGAIN_S), (terminate, STOP_S), (kill, None)):
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
        if self._listener:
            self._listener.close()

    def _run_once(self) -> None:
        """Starts the child and returns when it has ended."""
        try:
            command = list(self._command())
            environment = self._environment
            passed: tuple[int, ...] = ()
            if self._listener:
                passed = (self._listener.fileno(),)
                environment = {**environment, LISTENER_FD: str(passed[0])}
            child = subprocess.Popen(
                command,
                env=environment,
                pass_fds=passed,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # keeps Ctrl-C from it, and lets its children end with it
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
        if self._stopping.is_set():  # stop() may have come before there was a child
            child.terminate()
        end = threading.Thread(target=_kill_group_after, args=(child.pid,), name=f"end-{self.name}", daemon=True)
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
        if code == EXIT_SUPERSEDED:
            error = "a newer process has its id; its last log line names it"
            self._stopping.set()
        if code == EXIT_DRAINED:
            error = "it was drained on request"
            self._stopping.set()
        with self._lock:
            self._child, self._exit_code, self._error = None, code, error
        if not self._stopping.is_set():
            log.warning("%s ended with code %s, starting it again", self.name, code)


def _kill_group_after(child: int) -> None:
    """Kills a child's own children when it ends: a compiler would run on for minutes and hold the log open."""
    with contextlib.suppress(ChildProcessError):  # its end was seen already
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)

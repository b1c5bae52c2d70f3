import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cpd.common.errors import CheckpointError
from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from deploy.process import ProcessState, Supervised
from tests.waiting import DEADLINE_S

CHILD = """
import sys
from cpd.common.process import end_with_supervisor
end_with_supervisor()
print("ready", file=sys.stderr, flush=True)
import signal
signal.sigwait([signal.SIGINT])
"""
SUPERVISOR = """
import sys, os, signal, time
from deploy.process import Supervised
child = Supervised("child", lambda: [sys.executable, "-c", sys.argv[1]], dict(os.environ))
while not child.state().lines:
    time.sleep(0.02)
print(child.state().pid, flush=True)
signal.pause()
"""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


DRAINS = """
import signal, sys
from cpd.common.process import end_with_supervisor
end_with_supervisor()
terms = []
signal.signal(signal.SIGTERM, lambda *_: terms.append(1) or (len(terms) > 1 and sys.exit(0)))
print("runs", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""
"""Drains for ever at the first SIGTERM, and ends at the second one."""


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(code: str, cores: frozenset[int] = frozenset()) -> Supervised:
        started.append(Supervised("child", lambda: [sys.executable, "-c", code], dict(os.environ), cores))
        return started[-1]

    yield start
    for child in started:
        child.stop()


def test_processes_started_by_the_child_end_with_it(supervise: Callable[..., Supervised]) -> None:
    """The child starts a compiler, for example."""
    compiler = "subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    child = supervise(
        f"import subprocess, sys, time; print({compiler}.pid, file=sys.stderr, flush=True); time.sleep(300)"
    )
    wait_for(lambda: bool(child.state().lines), "it has started one")
    (pid,) = map(int, child.state().lines)
    assert psutil.Process(pid).name() == "sleep"
    child.stop()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "it has ended")


def test_a_child_restarts_even_if_its_own_children_hold_its_log_open(
    supervise: Callable[..., Supervised],
) -> None:
    child = supervise(
        "import subprocess, sys, time; "
        "print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr, flush=True); time.sleep(300)"
    )
    wait_for(lambda: bool(child.state().lines), "it has started one")
    pid = child.state().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: child.state().starts == 2, "it is started again")


def test_a_killed_child_is_restarted(supervise: Callable[..., Supervised]) -> None:
    child = supervise(CHILD)
    wait_for(lambda: "ready" in child.state().lines, "started")
    first = child.state()
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: child.state(from_line=first.next_line).lines == ["ready"], "started again")
    second = child.state()
    assert (second.starts, second.exit_code, second.error) == (2, -signal.SIGKILL, None)
    assert second.pid != first.pid
    assert not second.has_ended_for_good


def test_a_child_whose_id_a_newer_process_has_is_not_restarted(supervise: Callable[..., Supervised]) -> None:
    child = supervise(f"import sys; sys.exit({EXIT_SUPERSEDED})")
    wait_for(lambda: all(thread.name != "supervise-child" for thread in threading.enumerate()), "supervision ends")
    state = child.state()
    assert (state.starts, state.pid, state.exit_code) == (1, None, EXIT_SUPERSEDED)
    assert state.error == "a newer process has its id; its last log line names it"
    assert state.has_ended_for_good


def test_a_child_that_was_drained_on_request_is_not_restarted(supervise: Callable[..., Supervised]) -> None:
    child = supervise(f"import sys; sys.exit({EXIT_DRAINED})")
    wait_for(lambda: child.state().error is not None, "it has ended")
    state = child.state()
    assert (state.starts, state.pid, state.exit_code) == (1, None, EXIT_DRAINED)
    assert state.error == "it was drained on request"
    assert state.has_ended_for_good
    wait_for(lambda: all(thread.name != "supervise-child" for thread in threading.enumerate()), "supervision ends")


def test_stop_does_not_wait_for_a_child_that_drains(supervise: Callable[..., Supervised]) -> None:
    child = supervise(DRAINS)
    wait_for(lambda: bool(child.state().lines), "started")
    child.stop()
    assert child.state().exit_code == 0


def test_stop_ends_the_child_without_a_restart(supervise: Callable[..., Supervised]) -> None:
    child = supervise(CHILD)
    wait_for(lambda: bool(child.state().lines), "started")
    pid = child.state().pid
    assert pid is not None
    child.stop()
    assert not alive(pid)
    assert child.state().pid is None
    assert child.state().starts == 1
    child.stop()


def test_a_child_that_ignores_sigterm_is_killed(
    supervise: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.process.STOP_S", 0.2)
    child = supervise(
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', file=sys.stderr, flush=True); signal.pause()"
    )
    wait_for(lambda: bool(child.state().lines), "started")
    child.stop()
    assert child.state().exit_code == -signal.SIGKILL


def test_the_error_of_a_child_that_refuses_to_start_is_reported(supervise: Callable[..., Supervised]) -> None:
    child = supervise("import sys; print('a log line', file=sys.stderr); sys.exit('error: no such model')")
    states: list[ProcessState] = []

    def refused_twice() -> bool:
        states.append(child.state())
        return states[-1].starts >= 2

    wait_for(refused_twice, "a second start")
    assert any((state.error, state.exit_code) == ("no such model", 1) for state in states)
    assert "a log line" in states[-1].lines


def test_a_missing_program_is_reported() -> None:
    child = Supervised("child", lambda: ["/nonexistent/program"], {})
    try:
        wait_for(lambda: child.state().error is not None, "reported")
        assert child.state().error == "cannot start /nonexistent/program: No such file or directory"
    finally:
        child.stop()


def test_an_error_while_making_the_command_counts_as_a_failed_start() -> None:
    def no_model() -> list[str]:
        raise CheckpointError("no such model")

    child = Supervised("child", no_model, {})
    try:
        wait_for(lambda: child.state().error == "no such model", "reported")
    finally:
        child.stop()


def test_log_lines_are_reported_once_and_all_to_a_caller_of_another_supervisor(
    supervise: Callable[..., Supervised],
) -> None:
    child = supervise("import sys; sys.stderr.write('a\\nb\\n'); sys.stderr.flush(); sys.stdin.read()")
    wait_for(lambda: len(child.state().lines) == 2, "two lines")
    assert child.state(from_line=1).lines == ["b"]
    assert child.state(from_line=2).lines == []
    assert child.state(from_line=99).lines == ["a", "b"]


def test_the_child_runs_on_its_cores(supervise: Callable[..., Supervised]) -> None:
    core = min(os.sched_getaffinity(0))
    child = supervise(
        "import os, sys; print(os.sched_getaffinity(0), file=sys.stderr, flush=True); sys.stdin.read()",
        cores=frozenset({core}),
    )
    wait_for(lambda: bool(child.state().lines), "started")
    assert child.state().lines == [str({core})]
    assert os.sched_getaffinity(0) != {core} or os.cpu_count() == 1


def test_a_drained_child_gets_one_sigterm_and_takes_its_time(supervise: Callable[..., Supervised]) -> None:
    child = supervise(
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', file=sys.stderr)\n"
        "signal.sigwait([signal.SIGTERM]); print('draining', file=sys.stderr, flush=True); sys.stdin.readline()"
    )
    wait_for(lambda: child.state().lines == ["up"], "started")
    drain = threading.Thread(target=child.drain)
    drain.start()
    wait_for(lambda: child.state().lines == ["up", "draining"], "draining")
    assert child.state().pid is not None
    child.stop()  # cuts it short
    drain.join()
    assert child.state().starts == 1
    assert child.state().pid is None


def test_a_running_child_is_moved_to_other_cores_with_all_its_threads(supervise: Callable[..., Supervised]) -> None:
    child = supervise(
        "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print('up', file=sys.stderr)"
    )
    wait_for(lambda: bool(child.state().lines), "started")
    core = frozenset({max(os.sched_getaffinity(0))})
    child.use_cores(core)
    threads = [int(path.name) for path in Path(f"/proc/{child.state().pid}/task").iterdir()]
    assert len(threads) == 2
    assert all(os.sched_getaffinity(thread) == core for thread in threads)
    os.kill(child.state().pid or 0, signal.SIGKILL)
    wait_for(lambda: child.state().starts == 2 and child.state().pid is not None, "restarted")
    assert os.sched_getaffinity(child.state().pid or 0) == core


@pytest.mark.parametrize("code", [CHILD, DRAINS], ids=["child", "a-child-that-can-drain"])
def test_the_child_dies_with_a_killed_supervisor(code: str) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert alive(child)
        supervisor.kill()
        wait_for(lambda: not alive(child), "the child ended")

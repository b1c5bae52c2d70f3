"""Runs of small programs in place of experiments."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scripts.gpu import parts
from scripts.gpu.parts import Outcome, Part, run_all, run_part
from scripts.gpu.results import Exit

PATIENCE_S = 60.0


def program(name: str, code: str, seconds: float = PATIENCE_S) -> Part:
    return Part(name, ("-c", textwrap.dedent(code)), seconds, "about")


def run(part: Part, work: Path, seconds: float = PATIENCE_S) -> Outcome:
    return run_part(part, work, work, dict(os.environ), seconds)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


WRITES = """
    import json, os, sys
    print("hello")
    with open(os.path.join(os.environ["OUT"], "experiment.json"), "w") as file:
        json.dump({"figures": [{"name": "x", "value": 1}]}, file)
"""


def test_a_part_hands_in_its_result_and_its_log(tmp_path: Path) -> None:
    outcome = run(program("experiment", WRITES), tmp_path)
    assert outcome.status == "ok"
    assert outcome.figures == [{"name": "x", "value": 1}]
    assert (tmp_path / "logs" / "experiment.log").read_text() == "hello\n"


def test_a_part_that_fails_keeps_what_it_had_and_says_why(tmp_path: Path) -> None:
    outcome = run(program("experiment", WRITES + "    sys.exit('CUDA error: misaligned address')"), tmp_path)
    assert outcome.status == "failed"
    assert outcome.note == "CUDA error: misaligned address"
    assert outcome.figures


@pytest.mark.parametrize(("status", "name"), [(Exit.MISSING, "missing"), (Exit.NO_DEVICE, "no device"), (3, "failed")])
def test_exit_statuses_have_names(tmp_path: Path, status: int, name: str) -> None:
    assert run(program("experiment", f"import sys; sys.exit({int(status)})"), tmp_path).status == name


def test_a_part_that_hangs_is_stopped_with_everything_that_it_started(tmp_path: Path) -> None:
    code = f"""
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(1000)"])
        with open(os.path.join(os.environ["OUT"], "pid"), "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    """
    outcome = run(program("experiment", code), tmp_path, seconds=6)
    assert outcome.status == "timed out"
    assert outcome.result is None
    wait_until_gone(int((tmp_path / "results" / "pid").read_text()))


def test_a_failure_costs_the_parts_after_it_nothing(tmp_path: Path) -> None:
    chosen = [
        program("crashes", "import os; os.abort()"),
        program("hangs", "import time; time.sleep(1000)", seconds=0.5),
        program("experiment", WRITES),
    ]
    outcomes = list(run_all(chosen, tmp_path, tmp_path, dict(os.environ), 100))
    assert [outcome.status for outcome in outcomes] == ["failed", "timed out", "ok"]


def test_what_no_time_is_left_for_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def pretend(part: Part, work: Path, root: Path, environment: object, seconds: float) -> Outcome:
        given.append(seconds)
        return Outcome(part.name, "ok", seconds)

    monkeypatch.setattr(parts, "run_part", pretend)
    chosen = [program("short", "", seconds=20), program("long", "", seconds=1000)]
    assert [outcome.status for outcome in run_all(chosen, tmp_path, tmp_path, {}, 100)] == ["ok", "ok"]
    assert given[0] == 20
    assert given[1] <= 100
    assert [outcome.status for outcome in run_all(chosen, tmp_path, tmp_path, {}, 10)] == ["not run", "not run"]


def test_a_process_that_cannot_be_killed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in the driver can't be killed."""
    kill = parts._kill_group
    monkeypatch.setattr(parts, "_kill_group", lambda process: not kill(process))
    outcome = run(program("hangs", "import time; time.sleep(1000)"), tmp_path, seconds=0.5)
    assert outcome.status == "timed out"
    assert "can't be ended" in outcome.note


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={results}/tests_it.xml", "test_it.py")


def test_the_tests_are_figures_too(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_other(): pass\n"
    )
    outcome = run(Part("tests_it", PYTEST, PATIENCE_S, "about"), tmp_path)
    assert outcome.status == "failed"
    figures = {figure["name"]: figure for figure in outcome.figures}
    assert figures["tests_it: passed"]["value"] == 1
    assert figures["tests_it: passed"]["met"]
    assert figures["tests_it: failed"]["value"] == 1
    assert figures["tests_it: failed"]["note"] == "test_bad"
    assert not figures["tests_it: failed"]["met"]
    assert figures["tests_it: skipped"]["value"] == 1

"""Evaluation of runs under compute-sanitizer, which a script with canned output replaces."""

import sys
from pathlib import Path

import pytest

from scripts.gpu import sanitizer
from scripts.gpu.common import MissingError
from scripts.gpu.results import Report

CLEAN = "........ [100%]\n8 passed in 12.3s\n========= ERROR SUMMARY: 0 errors"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prints $SAYS and exits with $STATUS."""
    path = tmp_path / "compute-sanitizer"
    code = "import os, sys, time\nprint(os.environ['SAYS'])\ntime.sleep(float(os.environ.get('TAKES', 0)))"
    path.write_text(f"#!{sys.executable}\n{code}\nsys.exit(int(os.environ.get('STATUS', 0)))\n")
    path.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_tool", lambda: path)
    return path


@pytest.mark.parametrize(
    ("says", "status", "errors"),
    [
        (CLEAN, 0, [0]),
        ("1 failed in 3s\n========= ERROR SUMMARY: 0 errors", 1, [None]),
        ("8 passed in 1s\n========= ERROR SUMMARY: 2 errors\n========= ERROR SUMMARY: 1 error", 0, [3]),
        ("8 passed in 1s\n========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)", 0, [4]),
        ("========= Error: Device not supported", 1, [None]),
    ],
)
def test_errors_are_counted_where_the_tests_ran(
    tool: Path,
    experiment_report: Report,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    status: int,
    errors: list[int | None],
) -> None:
    monkeypatch.setattr(sanitizer, "CHECKS", sanitizer.CHECKS[:1])
    monkeypatch.setenv("SAYS", says)
    monkeypatch.setenv("STATUS", str(status))
    sanitizer.run(experiment_report)
    assert [figure.value for figure in experiment_report.figures] == errors
    assert experiment_report.figures[0].met is (errors == [0])
    assert "passed" in experiment_report.figures[0].note or errors == [None]


def test_what_takes_too_long_is_reported_and_the_next_one_runs(
    tool: Path, experiment_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [sanitizer.Check(check.tool, check.about, 0.5, check.tests) for check in sanitizer.CHECKS[:2]]
    monkeypatch.setattr(sanitizer, "CHECKS", slow)
    monkeypatch.setenv("SAYS", CLEAN)
    monkeypatch.setenv("TAKES", "60")
    sanitizer.run(experiment_report)
    assert [figure.note for figure in experiment_report.figures] == ["stopped after 0 s"] * 2


def test_without_the_tool_it_says_where_it_comes_from(
    experiment_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    with pytest.raises(MissingError, match="CUDA toolkit"):
        sanitizer.run(experiment_report)


def test_the_chosen_tests_exist() -> None:
    for check in sanitizer.CHECKS:
        source = (sanitizer.ROOT / check.tests[0]).read_text()
        assert all(word in source for word in check.tests[2].split() if word.startswith("test_")), check

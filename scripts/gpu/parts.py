"""Runs the parts of `gpu_check`, each in processes of its own: one that fails or hangs costs the others nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.gpu.results import Exit, Figure, Target

LEAST_SECONDS = 15
"""A part with less time than that is not started: torch alone takes most of it."""
_GRACE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One step of the check.

    Attributes:
        command: Arguments of the Python interpreter; {results} stands for the folder of results.
        seconds: It is stopped after so long.
        about: What it answers, in a few words.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    about: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended.

    Attributes:
        status: ok, failed, timed out, missing (a package), no device, or not run.
        note: Why, if not ok.
        result: Its result file, as far as it got; None: it wrote none.
    """

    name: str
    status: str
    seconds: float
    note: str = ""
    result: dict[str, Any] | None = None

    @property
    def figures(self) -> list[dict[str, Any]]:
        """Those of the result."""
        return self.result["figures"] if self.result else []

    def to_json(self) -> dict[str, Any]:
        """As in the summary's file."""
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "result": self.result,
        }


def run_part(part: Part, work: Path, root: Path, environment: Mapping[str, str], seconds: float) -> Outcome:
    """Runs a part with its output in `work/logs`, and reads its result from `work/results`.

    Args:
        root: Where it runs.
        seconds: Until it and everything it started is killed.
    """
    logs, results = work / "logs", work / "results"
    logs.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    log = logs / f"{part.name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *(argument.replace("{results}", str(results)) for argument in part.command)],
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "OUT": str(results), "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            ended = _kill_group(process)
    result = _read(results / f"{part.name}.json") or tests_result(part, results / f"{part.name}.xml")
    outcome = Outcome(part.name, "ok", time.monotonic() - started, result=result)
    if status is None:
        left = "" if ended else "; its process can't be ended, and may keep the device busy"
        return replace(outcome, status="timed out", note=f"stopped after {seconds:.0f} s{left}")
    if status == Exit.OK:
        return outcome
    names = {int(Exit.NO_DEVICE): "no device", int(Exit.MISSING): "missing"}
    return replace(outcome, status=names.get(status, "failed"), note=_last(log))


def tests_result(part: Part, report: Path) -> dict[str, Any] | None:
    """A result made of pytest's JUnit report; None: there is none."""
    try:
        suite = next(iter(ElementTree.parse(report).getroot().iter("testsuite")))
    except (OSError, ElementTree.ParseError, StopIteration):
        return None
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    bad = {"failure", "error"}
    names = [case.get("name", "?") for case in suite.iter("testcase") if bad & {child.tag for child in case}]
    figures = [
        Figure(f"{part.name}: passed", passed, "tests", target=Target(at_least=1)),
        Figure(f"{part.name}: failed", failed, "tests", target=Target(at_most=0), note=", ".join(names)),
        Figure(f"{part.name}: skipped", count["skipped"], "tests"),
    ]
    return {"schema": 1, "name": part.name, "question": part.about, "figures": [figure.to_json() for figure in figures]}


def run_all(
    parts: Sequence[Part], work: Path, root: Path, environment: Mapping[str, str], seconds: float
) -> Iterator[Outcome]:
    """Runs parts one after the other; those for which no time is left are not run."""
    deadline = time.monotonic() + seconds
    for part in parts:
        left = deadline - time.monotonic() - _GRACE_SECONDS
        if left < LEAST_SECONDS:
            yield Outcome(part.name, "not run", 0.0, "no time was left")
        else:
            yield run_part(part, work, root, environment, min(part.seconds, left))


def _kill_group(process: subprocess.Popen[bytes]) -> bool:
    """Ends what is left of a part's processes. False: the first one hangs in the driver, and is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
    return process.returncode is not None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _last(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"

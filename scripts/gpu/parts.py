"""Runs the parts of `gpu_check`, each in its own process, so that a failure or hang does not affect the others."""

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
"""A part is not started with less time left than this: importing torch takes most of it."""
_GRACE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One step of the check.

    Attributes:
        command: Arguments of the Python interpreter; {results} is replaced with the folder for results.
        seconds: Time limit.
        about: Short description.
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
        note: The reason, if not ok.
        result: Content of its result file; None if it wrote none.
    """

    name: str
    status: str
    seconds: float
    note: str = ""
    result: dict[str, Any] | None = None

    @property
    def figures(self) -> list[dict[str, Any]]:
        """Figures of the result."""
        return self.result["figures"] if self.result else []

    def to_json(self) -> dict[str, Any]:
        """The entry in the summary file."""
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "result": self.result,
        }


def run_part(part: Part, work: Path, root: Path, environment: Mapping[str, str], seconds: float) -> Outcome:
    """Runs a part in the folder `root`, with its log in `work/logs`, and reads its result from `work/results`.

    After `seconds` the part and all processes it started are killed.
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
    """Converts pytest's JUnit report to a result; None if there is none."""
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
    """Runs parts one after the other, within `seconds` in all. Parts without enough time left are not run."""
    deadline = time.monotonic() + seconds
    for part in parts:
        left = deadline - time.monotonic() - _GRACE_SECONDS
        if left < LEAST_SECONDS:
            yield Outcome(part.name, "not run", 0.0, "no time was left")
        else:
            yield run_part(part, work, root, environment, min(part.seconds, left))


def _kill_group(process: subprocess.Popen[bytes]) -> bool:
    """Kills a part's remaining processes. Returns False if its main process hangs in the driver and can't be killed."""
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
    """The last non-empty line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"

"""Does compute-sanitizer find errors in the engine's kernels?

Runs some GPU tests under NVIDIA's tool: memcheck on single kernels, with every tensor in its own allocation so that an
access one byte beyond it is found; memcheck on the engine with graphs and lanes, where tensors share allocations; then
synccheck and racecheck. The tool makes tests many times slower. A check that reaches its time limit is reported, and
the next one runs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu.common import MissingError
from scripts.gpu.results import Report, Target
from scripts.gpu.toolchain import cuda_root

NONE = Target(at_most=0)
ROOT = Path(__file__).parents[2]
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"),
    *("-o", "addopts=--import-mode=importlib", "-o", "timeout=0"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """A tool and the tests that run under it.

    Attributes:
        seconds: Time limit.
        tests: Arguments of pytest.
        alone: Give every tensor its own allocation. Graphs can't be captured then.
    """

    tool: str
    about: str
    seconds: float
    tests: tuple[str, ...]
    alone: bool = False


_KERNELS = ("tests/gpu/test_cuda_ops.py", "-k", "strided or norms or rope or silu")
_ENGINE = ("tests/gpu/test_cuda_engine.py", "-k", "test_lanes_follow_the_oracle and lanes-bfloat16 and qwen3")
CHECKS = (
    Check("memcheck", "kernels", 90, _KERNELS, alone=True),
    Check("memcheck", "engine with graphs and lanes", 120, _ENGINE),
    Check("synccheck", "kernels", 60, _KERNELS),
    Check("racecheck", "kernels", 90, _KERNELS),
)
"""The most valuable check comes first."""


def find_tool() -> Path | None:
    """Path of compute-sanitizer, which is part of the CUDA toolkit; None if it is not installed."""
    root = cuda_root()
    folders = [root / "bin", root / "compute-sanitizer"] if root else []
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders), "/usr/local/cuda/bin"])
    found = shutil.which("compute-sanitizer", path=path)
    return Path(found) if found else None


def run_check(tool: Path, check: Check, log: Path) -> tuple[int | None, str]:
    """Runs a check with its output in `log`. Returns the number of errors (None if the tests failed) and a note.

    Raises:
        subprocess.TimeoutExpired: The time limit passed. Processes may still run.
    """
    # API errors that torch handles, such as a query of an unfinished event, are no errors; compilers need no check.
    options = ["--report-api-errors", "no", "--target-processes", "application-only"]
    command = [str(tool), "--tool", check.tool, *options, *PYTEST, *check.tests]
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if check.alone else {})}
    with log.open("wb") as output:
        ran = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, timeout=check.seconds
        )
    text = log.read_text(errors="replace")
    counts = [int(count) for count in re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", text, re.MULTILINE)]
    tests = re.findall(r"^\d+ (?:passed|failed|error).*$", text, re.MULTILINE)
    note = tests[-1] if tests else next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
    # Tests that failed or did not run say nothing about the kernels.
    return (sum(counts) if counts and (ran.returncode == 0 or sum(counts)) else None), note.strip("= ")


def run(report: Report) -> None:
    """Runs the experiment."""
    tool = find_tool()
    if tool is None:
        raise MissingError("compute-sanitizer is not installed; it is part of NVIDIA's CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        for number, check in enumerate(CHECKS):
            log = (report.out or Path(folder)) / f"sanitizer-{number}-{check.tool}.log"
            name = f"{check.tool}, {check.about}"
            try:
                errors, note = run_check(tool, check, log)
            except subprocess.TimeoutExpired:
                report.add(name, None, "errors", target=NONE, note=f"stopped after {check.seconds:.0f} s")
                continue
            report.add(name, errors, "errors", target=NONE, note=note)

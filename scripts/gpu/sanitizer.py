"""Does compute-sanitizer find errors in what the engine runs on a GPU?

Runs some of the GPU tests under NVIDIA's tool: the kernels one by one with every tensor in an allocation of its own, so
that one byte beyond it is found (memcheck), then the engine with graphs and lanes, in which several tensors share an
allocation; then synccheck and racecheck. Tests take many times as long there; what takes too long ends the experiment.

Usage: `python -m scripts.gpu.sanitizer [--out DIR]`
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu.common import MissingError, run_experiment
from scripts.gpu.results import Report, Target
from scripts.gpu.toolchain import cuda_root

QUESTION = "Does compute-sanitizer find errors in the engine's kernels?"
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
        seconds: It is stopped after so long.
        tests: Arguments of pytest.
        alone: Whether every tensor gets an allocation of its own; graphs can't be captured then.
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
"""The most valuable first."""


def find_tool() -> Path | None:
    """compute-sanitizer, which is part of the CUDA toolkit; None: it is not here."""
    root = cuda_root()
    folders = [root / "bin", root / "compute-sanitizer"] if root else []
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders), "/usr/local/cuda/bin"])
    found = shutil.which("compute-sanitizer", path=path)
    return Path(found) if found else None


def run_check(tool: Path, check: Check, log: Path) -> tuple[int | None, str]:
    """Runs a check, with its output in `log`. Returns how many errors it found, None if it found no answer, and a note.

    Raises:
        subprocess.TimeoutExpired: It took too long. Its processes may still run.
    """
    # What torch tries and copes with, such as a query of an event that is not done, is no error. Compilers that are
    # started meanwhile need no check.
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
    # Tests that did not run, or failed, say nothing about the kernels.
    return (sum(counts) if counts and (ran.returncode == 0 or sum(counts)) else None), note.strip("= ")


def run(report: Report) -> None:
    """See the module."""
    tool = find_tool()
    if tool is None:
        raise MissingError("compute-sanitizer is not here; NVIDIA's CUDA toolkit has it")
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("sanitizer", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())

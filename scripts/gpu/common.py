"""What the GPU experiments share: the device they ran on, timing and ceilings. What they hand in: `results.py`.

An experiment is a module with `main() -> int` that calls `run_experiment`. Its figures are written down one by one, so
that what was measured before a failure or a time limit is kept.
"""

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.results import Ceilings, Environment, Exit, Report, heading, table

PACKAGES = ("torch", "triton", "flashinfer-python", "cuda-bindings", "nixl-cu13", "ucxx-cu13")
"""Whose versions a result names."""


class NoDeviceError(Exception):
    """There is no CUDA device."""


class MissingError(Exception):
    """A package that the experiment is about is not installed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of repeated runs, ms: the median, and between which values the middle 80 % lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """From the duration of each run; at least one."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])


def run_experiment(
    name: str,
    question: str,
    run: Callable[[Report], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the command line, runs an experiment and prints its table. Returns the exit status, see `Exit`.

    Args:
        question: What it is to answer, in one line.
        run: Measures, and calls `Report.add`.
        argv: Of the command; None: the process's.
    """
    parser = argparse.ArgumentParser(prog=f"python -m scripts.gpu.{name}", description=question)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for results (default: $OUT)")
    args = parser.parse_args(argv)
    # What the engine says about its lanes and graphs belongs beside the figures.
    logging.basicConfig(level=logging.INFO)
    try:
        require_cuda()
        report = Report(name, question, environment(), measure_ceilings(), args.out)
    except NoDeviceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return Exit.NO_DEVICE
    status = Exit.OK
    try:
        run(report)
    except MissingError as error:
        status, report.error = Exit.MISSING, str(error)
    except Exception as error:  # the figures so far are worth more than the way it ended
        traceback.print_exc()
        status, report.error = Exit.FAILED, f"{type(error).__name__}: {error}"
    report.write()
    print(f"\n{name}: {question}\n{heading(report.environment.device)}")
    print(table(report.figures))
    if report.error:
        print(f"{name} ended early: {report.error}", file=sys.stderr)
    return status


def require_cuda() -> torch.device:
    """The CUDA device.

    Raises:
        NoDeviceError: torch is built without CUDA, or finds no device.
    """
    if torch.version.cuda is None:
        raise NoDeviceError(
            f"no CUDA device: torch {torch.__version__} is built without CUDA; run this on a GPU machine"
        )
    if not torch.cuda.is_available():
        raise NoDeviceError(f"no CUDA device: torch {torch.__version__} finds none; run this on a GPU machine")
    return torch.device("cuda", torch.cuda.current_device())


def require(module: str, package: str) -> Any:
    """Imports a module that is not everywhere.

    Raises:
        MissingError: It is not installed, or does not load; says which package has it.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # what a broken native library raises when it is loaded is not only ImportError
        raise MissingError(
            f"{module} cannot be imported ({type(error).__name__}: {error}); carry the wheel of {package}, see "
            "docs/gpu-status.md"
        ) from error


def environment() -> Environment:
    """The device that is used, and the software on it. Needs a CUDA device."""
    properties = torch.cuda.get_device_properties(require_cuda())
    return Environment(
        device=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        sms=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / 2**30, 1),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        cuda=str(torch.version.cuda),
        python=platform.python_version(),
        packages=package_versions(),
        commit=commit(),
        date=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    )


def package_versions() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str:
    """See `Environment.commit`. A copy of the tree without its history is told by $CPD_COMMIT."""
    if named := os.environ.get("CPD_COMMIT"):
        return named
    root = str(Path(__file__).parents[2])
    head = _output("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no") else "")


def measure_ms(
    run: Callable[[int], object],
    *,
    sets: int = 1,
    warmup: int = 5,
    repeats: int = 30,
    queued: bool = False,
) -> Timing:
    """Times a piece of work on the current stream by CUDA events, one pair a run.

    Args:
        run: Called with the index of the input set to use: with several, whose data together exceed the L2 cache, each
            run finds its own evicted.
        queued: The device waits until all runs are launched, so that short kernels are not timed with the gaps between
            their launches. Leave it off where the cost of launching is part of the question.
    """
    for index in range(warmup):
        run(index % sets)
    torch.cuda.synchronize()
    events = [(_event(), _event()) for _ in range(repeats)]
    if queued:
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # about 10 ms: launching takes less than that
    for index, (start, end) in enumerate(events):
        start.record()
        run(index % sets)
        end.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) for start, end in events])


def measure_ceilings() -> Ceilings:
    """Measures `Ceilings`; takes about a second and 9 GB, which are given back."""
    ceilings = Ceilings(_copy_gb_s(2**32), _matmul_tflop_s(8192))
    torch.cuda.empty_cache()
    return ceilings


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copy_gb_s(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / measure_ms(lambda _: target.copy_(source), repeats=20).median / 1e6


def _matmul_tflop_s(n: int) -> float:
    left, right = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * n**3 / measure_ms(lambda _: torch.mm(left, right, out=product), repeats=20).median / 1e9


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; NaN if anything is not a number."""
    wanted = reference.double()
    return float(((out.double() - wanted).norm() / wanted.norm()).item())


def main() -> int:
    """Prints the environment as JSON; see `Exit` for what is returned without a device."""
    try:
        print(json.dumps(asdict(environment())))
    except NoDeviceError as error:
        print(error, file=sys.stderr)
        return Exit.NO_DEVICE
    return Exit.OK


def _output(*command: str) -> str:
    """What a command prints; nothing if it is not there or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""Helpers of the GPU experiments: the device, optional packages, timing and ceilings."""

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.results import Ceilings, Environment, Exit

PACKAGES = ("torch", "triton", "flashinfer-python", "cuda-bindings", "nixl-cu13", "ucxx-cu13")
"""Packages that a result lists with their versions."""

CPD = (sys.executable, "-c", "from cpd.cli.main import main; main()")
"""The command `cpd` where this checkout is not installed."""


class NoDeviceError(Exception):
    """There is no CUDA device."""


class MissingError(Exception):
    """A package that the experiment needs is not installed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of repeated runs, ms: the median, and the bounds of the middle 80 %."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """Summarises the duration of each run; needs at least one."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])


def require_cuda() -> torch.device:
    """Returns the CUDA device.

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
    """Imports an optional module.

    Raises:
        MissingError: It is not installed or does not load; the message names its package.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken native library raises more than ImportError
        raise MissingError(
            f"{module} cannot be imported ({type(error).__name__}: {error}); carry the wheel of {package}, see "
            "docs/gpu-status.md"
        ) from error


def environment() -> Environment:
    """Describes the CUDA device in use and the software."""
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
    """Versions of the installed packages of `PACKAGES`."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def commit() -> str:
    """See `Environment.commit`. For a copy of the tree without history, $CPD_COMMIT tells it."""
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
    """Times a piece of work on the current stream with CUDA events, one pair per run.

    Args:
        run: Called with the index of the input set to use.
        sets: Number of input sets. If together they exceed the L2 cache, each run finds its own set evicted.
        queued: Let the device wait until all runs are launched, so that gaps between launches do not count. Leave it
            off where the cost of launching is part of the question.
    """
    for index in range(warmup):
        run(index % sets)
    torch.cuda.synchronize()
    events = [(_event(), _event()) for _ in range(repeats)]
    if queued:
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # about 10 ms, longer than launching takes
    for index, (start, end) in enumerate(events):
        start.record()
        run(index % sets)
        end.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) for start, end in events])


def measure_ceilings() -> Ceilings:
    """Measures `Ceilings`. Takes about a second, and 9 GB that it frees again."""
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
    """‖out − reference‖ / ‖reference‖ in float64; NaN if any element is NaN."""
    wanted = reference.double()
    return float(((out.double() - wanted).norm() / wanted.norm()).item())


def main() -> int:
    """Prints the environment as JSON. Returns the exit status, see `Exit`."""
    try:
        print(json.dumps(asdict(environment())))
    except NoDeviceError as error:
        print(error, file=sys.stderr)
        return Exit.NO_DEVICE
    return Exit.OK


def _output(*command: str) -> str:
    """Output of a command; empty if the command is missing or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

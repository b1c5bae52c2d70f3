"""Runs one GPU experiment: `python -m scripts.gpu.run NAME [--out DIR]`.

An experiment is a module of this folder. The first line of its docstring is its question, its `run` measures. Figures
are written one by one, so that those measured before a failure or a time limit are kept.
"""

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.gpu.common import MissingError, NoDeviceError, environment, measure_ceilings, require_cuda
from scripts.gpu.results import Exit, Report, heading, table


def run_experiment(name: str, question: str, run: Callable[[Report], None], out: Path | None = None) -> Exit:
    """Runs an experiment and prints its table.

    Args:
        name: Name of the experiment and of its result file.
        question: The question it answers, in one line.
        run: Measures, and calls `Report.add`.
        out: Folder for results; None only prints them.
    """
    logging.basicConfig(level=logging.INFO)  # the engine's log lines on lanes and graphs explain the figures
    try:
        require_cuda()
        report = Report(name, question, environment(), measure_ceilings(), out)
    except NoDeviceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return Exit.NO_DEVICE
    status = Exit.OK
    try:
        run(report)
    except MissingError as error:
        status, report.error = Exit.MISSING, str(error)
    except Exception as error:  # keeps the figures measured so far
        traceback.print_exc()
        status, report.error = Exit.FAILED, f"{type(error).__name__}: {error}"
    report.write()
    print(f"\n{name}: {question}\n{heading(report.environment.device)}")
    print(table(report.figures))
    if report.error:
        print(f"{name} ended early: {report.error}", file=sys.stderr)
    return status


def find_experiment(name: str) -> tuple[str, Callable[[Report], None]]:
    """The question of an experiment, and the function that measures."""
    module = importlib.import_module(f"scripts.gpu.{name}")
    return (module.__doc__ or "").partition("\n")[0], module.run


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the experiment; the exit status, see `Exit`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.run", description="Run one GPU experiment.")
    parser.add_argument("name", help="module of scripts/gpu, such as decode_floor")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for results (default: $OUT)")
    args = parser.parse_args(argv)
    return run_experiment(args.name, *find_experiment(args.name), args.out)


if __name__ == "__main__":
    sys.exit(main())

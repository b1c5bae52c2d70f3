"""`python -m simulated_workers`: all workers of a simulated cluster in one process."""

import os

import typer

from cpd.common.options import command
from cpd.common.settings import SimulatedSettings


def run(settings: SimulatedSettings) -> None:
    """Runs workers without a model: they answer when real workers would, but the text is random."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from simulated_workers import host
    from worker.process import run_process

    run_process("simulated", settings, lambda: host.serve(settings))


if __name__ == "__main__":
    typer.run(command(SimulatedSettings, run))

"""`python -m decode_worker`: one combined node."""

import os

import typer

from cpd.config import WorkerSettings
from cpd.options import command


def run(settings: WorkerSettings) -> None:
    """Answers requests: prefills short prompts itself, has long ones prefilled elsewhere, and decodes."""
    # Before torch is imported: threads that spin between steps take the cores from whoever shares them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from decode_worker.service import DecodeService
    from worker import process

    process.run(settings, "combined", DecodeService)


if __name__ == "__main__":
    typer.run(command(WorkerSettings, run))

"""`python -m decode_worker`: one combined worker."""

import os

import typer

from cpd.common.options import command
from cpd.common.settings import WorkerSettings


def run(settings: WorkerSettings) -> None:
    """Answers requests: prefills short prompts itself, has long ones prefilled elsewhere, and decodes."""
    # Before torch is imported: threads must not spin between steps, because other processes share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before CUDA starts: with the default of 8 hardware queues a decode's launch can wait behind a prefill's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from decode_worker.service import DecodeService
    from prefill_worker.service import PrefillService
    from worker import process

    process.run(settings, "combined", DecodeService, PrefillService)


if __name__ == "__main__":
    typer.run(command(WorkerSettings, run))

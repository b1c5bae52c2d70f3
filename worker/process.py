"""The process around a worker: start, signals, exit code."""

import asyncio
import logging
import os
import signal
import sys

from cpd.config import Role, WorkerSettings
from cpd.process import end_with_supervisor, setup_logging
from worker.service import MakeService
from worker.worker import Worker

SWITCH_INTERVAL_S = 1e-4
"""Other threads may hold the interpreter this long while the engine thread waits for it."""


def run(settings: WorkerSettings, role: Role, make_service: MakeService) -> None:
    """Runs a worker and ends the process with its exit code.

    Raises:
        CPDError: The worker can't start.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    setup_logging(settings.log_level, settings.worker_id or role)
    end_with_supervisor()
    code = asyncio.run(_run(settings, role, make_service))
    logging.shutdown()
    # The engine thread may still be inside a step, and an interpreter that shuts down under it can crash.
    os._exit(code)


async def _run(settings: WorkerSettings, role: Role, make_service: MakeService) -> int:
    worker = Worker(settings, role, make_service)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.lifecycle.stop, f"got {number.name}")
    return await worker.run()

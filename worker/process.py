"""Runs one or several workers as a process: start, signals, exit code."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import uvloop

from cpd.common.lifecycle import on_stop_signals
from cpd.common.logs import setup_logging
from cpd.common.process import collect_garbage_rarely, end_with_supervisor, switch_threads_often
from cpd.common.settings import Role, SharedSettings, WorkerSettings
from worker.context import EXIT_RESTART
from worker.service import MakeDecodePart, MakePrefillPart
from worker.worker import Worker

log = logging.getLogger(__name__)


def run(settings: WorkerSettings, role: Role, make_decode: MakeDecodePart, make_prefill: MakePrefillPart) -> None:
    """Runs a worker, which starts in this role, and ends the process with its exit code.

    Raises:
        CPDError: The worker can't start.
    """
    from worker.engine_loader import expected_memory, load_engine  # imports torch, which simulated workers don't need

    async def serve() -> int:
        worker = Worker(
            settings, role, make_decode, make_prefill, build_engine=load_engine, expect_memory=expected_memory
        )
        on_stop_signals(worker.lifecycle)
        on_failed_threads(worker.lifecycle.stop)
        return await worker.run()

    run_process(settings.worker_id or role, settings, serve)


def run_process(name: str, settings: SharedSettings, serve: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Runs `serve` and ends the process with the exit code that it returns.

    Raises:
        CPDError: Raised by `serve`.
    """
    switch_threads_often()
    setup_logging(settings.log_level, settings.log_format, name)
    end_with_supervisor()
    collect_garbage_rarely()
    code = uvloop.run(serve())
    logging.shutdown()
    # The engine thread may still run a step: an orderly interpreter shutdown could crash it.
    os._exit(code)


def on_failed_threads(stop: Callable[[str, int], None]) -> None:
    """Calls `stop` with reason and exit code, on the running loop, when a thread of this process fails.

    Its unfinished work is unknown, and others might wait for it for ever.
    """
    loop = asyncio.get_running_loop()

    def failed(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        log.critical("thread %s failed", name, exc_info=args.exc_value)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends anyway
            loop.call_soon_threadsafe(stop, f"thread {name} failed: {args.exc_value!r}", EXIT_RESTART)

    threading.excepthook = failed

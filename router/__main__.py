"""`python -m router` runs one router."""

import asyncio
import resource
import secrets
import signal
import sys

import typer
import uvloop

from cpd.common.lifecycle import Lifecycle, on_stop_signals
from cpd.common.logs import setup_logging
from cpd.common.options import command
from cpd.common.process import collect_garbage_rarely, end_with_supervisor, switch_threads_often
from cpd.common.settings import RouterSettings
from router.listener import inherited, listen
from router.server import serve


def run(settings: RouterSettings) -> None:
    """Serve the OpenAI-compatible HTTP API for the workers of a cluster."""
    router_id = settings.router_id or f"router-{secrets.token_hex(4)}"
    setup_logging(settings.log_level, settings.log_format, router_id)
    end_with_supervisor()
    collect_garbage_rarely()
    switch_threads_often()  # the event loop waits for threads that render and parse
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection is an open file
    sys.exit(uvloop.run(_until_signalled(settings, router_id)))


async def _until_signalled(settings: RouterSettings, router_id: str) -> int:
    lifecycle, reread = Lifecycle(settings.drain_s), asyncio.Event()
    on_stop_signals(lifecycle)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reread.set)
    passed = inherited()
    with passed or listen(settings.host, settings.port) as listener:
        return await serve(settings, router_id, listener, lifecycle, reread, others_accept=passed is not None)


def main() -> None:
    """Runs the command line."""
    typer.run(command(RouterSettings, run))


if __name__ == "__main__":
    main()

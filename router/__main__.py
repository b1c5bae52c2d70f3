"""`python -m router`: one router process."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import typer
import uvicorn
import uvloop
from redis.asyncio import Redis

from cpd.config import RouterSettings
from cpd.errors import ConfigError
from cpd.membership import Member, lease
from cpd.options import command
from cpd.process import end_with_supervisor, setup_logging
from router.app import create_app
from router.checkpoint import load_checkpoint
from router.metrics import Metrics
from router.service import Service
from router.workers import Workers

LEASE_S = 5.0
REDIS_TIMEOUT_S = 2.0
SHUTDOWN_S = 2
"""Running responses have this long to end, in seconds, once the process is told to."""


def run(settings: RouterSettings) -> None:
    """Serve the OpenAI-compatible HTTP API for the workers of a cluster."""
    router_id = settings.router_id or f"router-{secrets.token_hex(4)}"
    setup_logging(settings.log_level, router_id)
    end_with_supervisor()
    uvloop.run(_serve(settings, router_id))


async def _serve(settings: RouterSettings, router_id: str) -> None:
    if not settings.redis_url:
        raise ConfigError("redis-url is needed: it is where the router finds the workers")
    checkpoint = load_checkpoint(Path(settings.model), settings.served_model_name)
    workers = Workers(router_id, settings.cluster_token.get_secret_value())
    service = Service(settings, checkpoint, workers, Metrics(lambda: workers.sessions))
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    member = Member(
        id=router_id,
        kind="router",
        address=f"{host}:{port}",
        host=socket.gethostname(),
        pid=os.getpid(),
        incarnation=secrets.randbits(53),
    )
    server = _Server(
        uvicorn.Config(
            create_app(service),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )
    redis = Redis.from_url(settings.redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
    async with redis, lease(redis, settings.cluster, member, LEASE_S):
        following = asyncio.create_task(workers.run(redis, settings.cluster, service.dispatcher), name="workers")
        try:
            await server.serve(sockets=[listener])
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following


class _Server(uvicorn.Server):
    """Ends its own work only: uvicorn's would raise the signal again and skip what comes after."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; several routers may share one port, and the kernel spreads connections over them.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # accepted connections inherit these: a client's machine that is gone is noticed within a minute
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    typer.run(command(RouterSettings, run))

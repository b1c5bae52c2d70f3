"""A router process from its settings to its end: socket, lease, workers, HTTP server."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cpd.config import RouterSettings
from cpd.errors import ConfigError
from cpd.membership import Member, lease
from router.app import create_app
from router.checkpoint import load_checkpoint
from router.metrics import Metrics
from router.service import Service
from router.workers import Workers

LEASE_S = 5.0
REDIS_TIMEOUT_S = 2.0
GRACE_S = 1.0
"""Running responses have this long to end, in seconds, once the router is told to stop; then they fail."""

SHUTDOWN_S = 2
"""After so long, in seconds, connections that are still open are cut."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; several routers may share one port, and the kernel spreads connections over them.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}: {error.strerror or error}") from None
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT, socket.SO_KEEPALIVE):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        # accepted connections inherit these: a client's machine that is gone is noticed within a minute
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from None
    return listener


async def serve(settings: RouterSettings, router_id: str, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serves HTTP on `listener` until `stop` is set; running responses then have GRACE_S to end.

    Raises:
        CPDError: The settings or the checkpoint can't be used.
    """
    if not settings.redis_url:
        raise ConfigError("redis-url is needed: Redis is where the router finds the workers")
    checkpoint = load_checkpoint(Path(settings.model), settings.served_model_name)
    workers = Workers(router_id, settings.cluster_token.get_secret_value(), itl_ms=settings.slo_itl)
    service = Service(settings, checkpoint, workers, Metrics(lambda: workers.sessions))
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

    ended = asyncio.Event()

    async def end() -> None:
        await stop.wait()
        server.should_exit = True
        await asyncio.sleep(GRACE_S)
        service.dispatcher.close()

    redis = Redis.from_url(
        settings.redis_url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),  # both users try again by themselves
    )
    async with (
        redis,
        lease(redis, settings.cluster, _member(router_id, listener), LEASE_S),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(workers.run(redis, settings.cluster, service.dispatcher, ended))
        ending = group.create_task(end())
        await server.serve(sockets=[listener])
        ended.set()
        ending.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to the process: uvicorn would raise them again, past whatever still has to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _member(router_id: str, listener: socket.socket) -> Member:
    host, port = listener.getsockname()[:2]
    return Member(
        id=router_id,
        kind="router",
        address=f"{host}:{port}",
        host=socket.gethostname(),
        pid=os.getpid(),
        incarnation=secrets.randbits(53),
    )

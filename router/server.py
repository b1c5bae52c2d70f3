"""Starts, runs and stops a router: socket, lease, workers, HTTP servers."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp

from cpd.common.addresses import in_url, join_address
from cpd.common.errors import ConfigError
from cpd.common.lifecycle import Lifecycle
from cpd.common.membership import Member, lease
from cpd.common.model_digest import model_digest
from cpd.common.process import EXIT_SUPERSEDED
from cpd.common.redis_client import NoBackoff, Redis, Retry
from cpd.common.served_models import ServedModel
from cpd.common.settings import RouterSettings
from cpd.common.tls import Certificate, make_certificate
from cpd.common.tls_reads import cheap_reads
from cpd.common.trust import ClusterSecret, cluster_secret, is_loopback
from router.api.allowed_hosts import AllowedHosts
from router.api.app import create_app
from router.api.client_limit import ClientLimit
from router.api.completions import CompletionService
from router.api.connection import Connection, ConnectionsState
from router.api.models import Models
from router.api.openai_responses.store import ResponseStore
from router.api.sampling import default_sampling
from router.api.tenants import Keys, Limits, read_keys
from router.dispatch.roster import Followed, Roster
from router.dispatch.workers import Workers
from router.followed_files import FollowedFiles, follow
from router.listener import listen
from router.operations.peer_routers import PeerRouters
from router.operations.planner_metrics import PlannerMetrics
from router.operations.scaling import Scaling
from router.operations.summary import summarize
from router.operations.vllm_metrics import ServedMetrics, VllmMetrics
from router.operations.worker_metrics import WorkerMetrics
from router.placement.learning import Learning
from router.request_metrics import RequestMetrics, RouterMetrics
from router.server_certificate import ServerCertificate, certificate_files, server_context
from router.text.fair_threads import FairThreads
from router.text.text_files import load_text_files

if TYPE_CHECKING:
    from cpd.common.tracing import Tracing

REDIS_TIMEOUT_S = 2.0
PEERS_POLL_S = 0.1
"""Interval at which a router that is not ready asks whether a peer serves the port, in seconds."""

GRACE_S = 1.0
"""Time for running responses to end after the router was told to stop at once, in seconds; then they fail."""

READY_S = 10.0
"""Time that a router has to become ready before it accepts connections that could also wait, in seconds."""

ACCEPT_S = 10.0
"""Time for which a router that drains accepts connections if no other router can take them, in seconds."""

QUIET_S = 2.0
"""A router that drains has nothing left to do once it runs no request, and none came for this long, in seconds. A load
balancer notices meanwhile that it is not ready, and clients learn that their connections are closed."""

DRAIN_POLL_S = 0.05
"""Interval at which a router that drains looks whether something runs, in seconds."""

KEEP_ALIVE_S = 620
"""Time for which an idle connection stays open, in seconds: longer than load balancers keep theirs (Google's 600 s), so
that they never send a request on a connection that is being closed, which would fail with 502."""

SHUTDOWN_S = 2
"""Time after which connections are cut once the server has stopped listening, in seconds."""


async def serve(
    settings: RouterSettings,
    router_id: str,
    listener: socket.socket,
    lifecycle: Lifecycle,
    reread: asyncio.Event | None = None,
    *,
    others_accept: bool = False,
) -> int:
    """Serves HTTP on `listener` until the life cycle ends.

    While it drains it is not ready, but goes on serving until nobody sends any more; each response closes its
    connection. It accepts connections for ACCEPT_S more; none if `others_accept` and a ready router does. When the time
    of the drain is over, or it is stopped, running responses have GRACE_S to end.

    This router accepts no connections while it is not ready and a peer serves the same port. With `others_accept` it
    gives itself READY_S to become ready: connections can wait. It stops by itself when a newer router has taken its id.

    The key file and the certificate are read again when they change, and when `reread` is set.

    Args:
        others_accept: Whether other routers of this machine accept from the same socket, and the next process does.

    Returns:
        The process's exit code.

    Raises:
        CPDError: The settings or the checkpoint can't be used.
    """
    if not settings.redis_url:
        raise ConfigError("--redis-url is needed: Redis is where the router finds the workers")
    secret = cluster_secret(settings)
    followed: list[FollowedFiles[Any]] = []
    served = _served(settings)
    limits = Limits(settings.tenant_requests, settings.tenant_tokens_per_minute, int(settings.tenant_body_memory))
    keys = Keys(settings.api_key, (), secret, limits)
    if key_file := settings.api_key_file:
        names = [name for one in served for name in one.names]
        followed.append(FollowedFiles("API keys", [key_file], partial(read_keys, key_file, names), keys.replace))
    tls = ServerCertificate()
    if pair := certificate_files(settings.tls_cert, settings.tls_key):
        followed.append(FollowedFiles("certificate and its key", pair, partial(server_context, *pair), tls.use))
    roster, metrics = Roster(router_id, secret), RouterMetrics()
    metrics.registry().register(PlannerMetrics(roster))
    threads = FairThreads()  # tenants share the threads of all models fairly
    models = Models([_service(settings, one, router_id, secret, metrics, threads) for one in served])
    measured = [ServedMetrics(one.name, one.metrics, one.workers) for one in models.services]
    metrics.registry().register(VllmMetrics(measured))
    member_host = settings.advertise_host or listener.getsockname()[0]
    peers = PeerRouters(router_id, lambda: roster.routers)
    hosts = _allowed_hosts(settings, listener, member_host, has_keys=keys.any)
    redis = Redis.from_url(
        settings.redis_url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),  # lease and membership retry by themselves
    )
    ttl_s = settings.store_responses
    responses = ResponseStore(redis, settings.cluster, secret, ttl_s) if ttl_s else None
    scaling = Scaling(redis, settings.cluster, secret)
    clients = ClientLimit(settings.max_connections_per_client, settings.trusted_proxies)
    tracing = _start_tracing(settings, router_id)
    server = _server(
        create_app(models, roster, metrics, keys, hosts, clients, peers, lifecycle, scaling, responses, tracing),
        clients,
        tls.context if pair else None,
    )
    unlimited = ClientLimit(0)
    certificate = None if is_loopback(settings.host) else make_certificate()
    admin_tls = certificate.context if certificate is not None else None
    admin_app = create_app(models, roster, metrics, keys, hosts, unlimited, None, lifecycle, scaling)
    admin = _server(admin_app, unlimited, admin_tls)
    ended = asyncio.Event()

    def superseded() -> None:
        lifecycle.stop("a newer process has its id", EXIT_SUPERSEDED)

    async def serve_public(member: Member) -> None:
        await roster.polled.wait()
        waits_until = asyncio.get_running_loop().time() + (READY_S if others_accept else 0)
        while not (lifecycle.draining.is_set() or models.ready):
            if asyncio.get_running_loop().time() >= waits_until and not await peers.serve_at(member):
                break
            await asyncio.sleep(PEERS_POLL_S)
        if not lifecycle.draining.is_set():
            await server.serve(sockets=[listener])

    async def end(member: Member) -> None:
        await lifecycle.draining.wait()
        if others_accept and await peers.serve_at(member):
            server.stop_accepting()
        await server.drained(lifecycle)
        lifecycle.stop("drained")
        server.should_exit = True
        await asyncio.sleep(GRACE_S)
        for service in models.services:
            service.dispatcher.close()

    with listen(settings.host, settings.admin_port, shared=False) as admin_listener:
        member = _member(router_id, member_host, listener, admin_listener, certificate)
        async with (
            redis,
            lease(redis, settings.cluster, secret, member, settings.lease_s, superseded),
            asyncio.TaskGroup() as group,
        ):
            all_workers = [Followed(one.workers, one.dispatcher) for one in models.services]
            group.create_task(roster.run(redis, settings.cluster, all_workers, ended))
            group.create_task(summarize(metrics.activity, [one.workers for one in models.services], ended))
            group.create_task(admin.serve(sockets=[admin_listener]))
            helpers = [
                group.create_task(end(member)),
                group.create_task(follow(followed, reread or asyncio.Event())),
            ]
            await serve_public(member)
            admin.should_exit = True
            ended.set()
            for helper in helpers:
                helper.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    return lifecycle.exit_code


def _start_tracing(settings: RouterSettings, router_id: str) -> "Tracing | None":
    if not settings.otlp_endpoint:
        return None
    from cpd.common.tracing import Tracing  # and OpenTelemetry's SDK with it

    return Tracing(
        settings.otlp_endpoint,
        service="cpd-router",
        instance=router_id,
        cluster=settings.cluster,
        share=settings.otlp_sampling,
    )


def _served(settings: RouterSettings) -> list[ServedModel]:
    """Returns the models that the settings name.

    Raises:
        ConfigError: The settings for one model and those for several are mixed.
    """
    settings.check_models()
    if not settings.models:
        name = settings.served_model_name or Path(settings.model).resolve().name
        return [ServedModel.model_construct(name=name, aliases=[], model=settings.model)]
    return settings.models


def _service(
    settings: RouterSettings,
    served: ServedModel,
    router_id: str,
    secret: ClusterSecret,
    router_metrics: RouterMetrics,
    threads: FairThreads,
) -> CompletionService:
    """Reads a model's files, and returns what serves it.

    Raises:
        CPDError: The checkpoint can't be used.
    """
    directory, several = Path(served.model), bool(settings.models)
    text_files = load_text_files(directory, served.name, threads)
    workers = Workers(
        router_id,
        secret,
        model_name=served.name if several else "",
        model_digest=model_digest(directory),
        itl_ms=settings.slo_itl,
        learning=Learning(settings.policy, settings.slo_ttft),
    )
    metrics = RequestMetrics(router_metrics, workers.model_name)
    router_metrics.registry(workers.model_name).register(WorkerMetrics(workers))
    defaults = default_sampling(directory, settings.sampling_defaults)
    return CompletionService(settings, text_files, defaults, workers, metrics, served.aliases)


def _server(app: ASGIApp, clients: ClientLimit, tls: ssl.SSLContext | None = None) -> "_Server":
    def connection(**arguments: Any) -> asyncio.BaseProtocol:
        return cheap_reads(Connection(clients=clients, **arguments), tls=tls is not None)

    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connection),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    config.load()
    config.ssl = tls  # uvicorn's own setting would read the files again, and ask for passwords
    return _Server(config)


class _Server(uvicorn.Server):
    """Leaves signals to the process: uvicorn would raise them again before everything has ended."""

    server_state: ConnectionsState

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = ConnectionsState()

    def stop_accepting(self) -> None:
        """Closes the socket that it listens on; connections go on."""
        if self.started:
            for server in self.servers:
                server.close()

    async def drained(self, lifecycle: Lifecycle) -> None:
        """Returns when no request runs and no POST came for QUIET_S, or when the drain's time is over.

        Meanwhile each response closes its connection, and after ACCEPT_S no more are accepted.
        """
        loop = asyncio.get_running_loop()
        posts, began = self.server_state.posts, loop.time()
        quiet_since = began
        while not (lifecycle.stopping.is_set() or lifecycle.time_is_over):
            if loop.time() - began >= ACCEPT_S:
                self.stop_accepting()
            connections = cast(set[Connection], self.server_state.connections)
            for connection in connections:
                connection.close_after_response()
            if self.server_state.tasks or self.server_state.posts != posts:
                posts, quiet_since = self.server_state.posts, loop.time()
            if loop.time() - quiet_since >= QUIET_S:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lifecycle.stopping.wait(), DRAIN_POLL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allowed_hosts(
    settings: RouterSettings, listener: socket.socket, member_host: str, *, has_keys: bool
) -> AllowedHosts:
    names = settings.allowed_hosts
    if not names and (has_keys or not ip_address(listener.getsockname()[0]).is_loopback):
        names = ["*"]
    return AllowedHosts([*names, in_url(settings.host), in_url(member_host)])


def _member(
    router_id: str, host: str, listener: socket.socket, admin: socket.socket, certificate: Certificate | None
) -> Member:
    admin_address = join_address(host, admin.getsockname()[1])
    return Member(
        id=router_id,
        kind="router",
        address=join_address(host, listener.getsockname()[1]),
        admin=certificate.named_in(admin_address) if certificate is not None else admin_address,
        host=socket.gethostname(),
        pid=os.getpid(),
    )

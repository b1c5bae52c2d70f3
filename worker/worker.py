"""A worker process: starts and stops engine, transport, servers and lease in the right order.

Parts in the order of their start; each is closed before the one above it:

    part         runs on         what it does
    residency    event loop      if models share the device: waits until this one may load, and decides when it sleeps
    engine       engine thread   computes (`AsyncEngine`); its runner owns the pool memory, as long as the process lives
    sleeper      event loop      if models share the device: gives the memory away and gets it back (`sleeper.py`)
    transport    event loop      reads and writes pool memory
    service      event loop      answers requests and prefill requests, with engine and transport
    servers      event loop      take sessions and prefill requests (cpd/common/stream.py) and administration (gRPC)
    lease        event loop      lists the worker for as long as its servers listen

Once the worker serves, residency is closed before all others: the model stays as it is while they close.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import kvtransfer
from cpd.common.addresses import join_address
from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import ConfigError
from cpd.common.lifecycle import Lifecycle
from cpd.common.membership import Member, lease
from cpd.common.model_digest import model_digest
from cpd.common.process import EXIT_SUPERSEDED
from cpd.common.redis_client import NoBackoff, Redis, Retry
from cpd.common.settings import Role, WorkerSettings
from cpd.common.stream import StreamServer
from cpd.common.tls import make_certificate, without_fingerprint
from cpd.common.trust import cluster_secret, is_loopback
from cpd.residency.snapshot import ModelState
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from engine.engine import Engine
from engine.types import EngineStats
from worker.admin import AdminServicer
from worker.async_engine import AsyncEngine, EngineThread, Update
from worker.context import EXIT_RESTART, ExpectedMemory, LoadedEngine, WorkerContext
from worker.grammars import load_grammars
from worker.grpc_options import SERVER_OPTIONS, AdminKeyInterceptor
from worker.load_report import LoadReporter, load_from_stats
from worker.pool_transport import OpenTransport, PoolTransport
from worker.prefill_client import PrefillClient
from worker.residency import Residency
from worker.resident import AlwaysServing
from worker.service import MakeDecodePart, MakePrefillPart, WorkerService
from worker.session_server import HELLO_BYTES, SessionServer
from worker.shared_device import share_device
from worker.sleeper import Sleeper
from worker.watchdog import HANG_S, hang

if TYPE_CHECKING:
    from cpd.common.tracing import Tracing

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
STOP_STEP_S = 0.7
"""Time limit of each step of a stop; together they stay within the three seconds that a supervisor waits."""
REDIS_TIMEOUT_S = 0.7

_ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}


class MakeEngine(Protocol):
    """The signature of `EngineThread`."""

    def __call__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> AsyncEngine: ...


class Worker:
    """A running worker.

    Args:
        settings: The worker's settings.
        role: Its role at the start.
        make_decode: Makes the part that answers requests.
        make_prefill: Makes the part that computes prompts for other workers.
        build_engine: Builds the engine; runs on the engine's thread.
        make_engine: Makes the AsyncEngine.
        open_transport: Opens a transport over the engine's pool.
        expect_memory: Returns what the model will take; runs on another thread, and only if models share the device.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        make_decode: MakeDecodePart,
        make_prefill: MakePrefillPart,
        *,
        build_engine: Callable[[WorkerSettings], LoadedEngine],
        make_engine: MakeEngine = EngineThread,
        open_transport: OpenTransport = kvtransfer.create,
        expect_memory: Callable[[WorkerSettings], ExpectedMemory] = lambda settings: ExpectedMemory(0, ""),
    ) -> None:
        self._settings = settings
        self._started_as = self._role = role
        self._make_decode, self._make_prefill = make_decode, make_prefill
        self._build_engine = build_engine
        self._make_engine = make_engine
        self._open_transport = open_transport
        self._expect_memory = expect_memory
        self._sleeper: Sleeper | None = None
        self._residency: Residency | None = None
        self._model_digest = b""
        self.id = settings.worker_id or f"{role}-{secrets.token_hex(4)}"
        self.address = self.session_address = ""
        self.lifecycle = Lifecycle(settings.drain_s, self._load_changed)
        self._stats = EngineStats.empty()
        self._reporter: LoadReporter | None = None
        self._down = contextlib.AsyncExitStack()

    async def run(self) -> int:
        """Starts, serves until the life cycle ends, and stops.

        Returns:
            The exit code.

        Raises:
            CPDError: The worker can't start.
        """
        async with self._down:
            draining = asyncio.create_task(self.lifecycle.draining.wait())
            start = asyncio.create_task(self._start())
            await asyncio.wait([start, draining], return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await self._serve()
            for task in (start, draining):
                task.cancel()
            await asyncio.gather(start, draining, return_exceptions=True)
        return self.lifecycle.exit_code

    def set_role(self, role: Role) -> None:
        """Changes the role that the worker announces. What runs goes on; routers follow with the next load report."""
        if role != self._role:
            log.info("the role changes from %s to %s", self._role, role)
            self._role = role
            self._load_changed()

    # ---- start: each part pushes its close on the stack ----

    async def _start(self) -> None:
        settings = self._settings
        host = advertised_host(settings)
        self._secret = cluster_secret(settings)
        self._redis = _redis(settings.redis_url)
        self._down.push_async_callback(_bounded, self._redis.aclose, "Redis")
        if settings.device_memory is not None:
            await self._take_turn()
        self._engine = self._make_engine(self._build, on_failure=self._engine_failed)
        self._down.push_async_callback(_bounded, self._engine.close, "the engine")
        await self._engine.start()
        loaded = self._loaded
        self._model_digest = await asyncio.to_thread(model_digest, Path(settings.model)) if settings.model else b""
        self._grammars = await load_grammars(loaded.grammars_of, loaded.limits.vocab_size)
        self._transport = PoolTransport(self._open_transport, loaded.memory, settings)
        await self._transport.open()
        self._down.push_async_callback(_bounded, self._transport.close, "the transport")
        if loaded.model_memory is not None:
            self._sleeper = Sleeper(
                self._engine,
                loaded.model_memory,
                self._transport,
                self.lifecycle,
                release_s=settings.prefill_progress_s,
                changed=self._load_changed,
                arrived=self._request_arrived,
                given_up=self._request_given_up,
            )
        prefill_client = PrefillClient(self.id, self._secret)
        self._down.push_async_callback(_bounded, prefill_client.close, "streams to other workers")
        self._service = WorkerService(
            WorkerContext(
                worker_id=self.id,
                settings=settings,
                engine=self._engine,
                transport=self._transport,
                prefill_client=prefill_client,
                limits=loaded.limits,
                fingerprint=loaded.fingerprint,
                memory=loaded.memory,
                colocation=loaded.engine.colocation,
                progress=loaded.progress,
                grammars=self._grammars,
                model=self._sleeper or AlwaysServing(),
                lifecycle=self.lifecycle,
                load_changed=self._load_changed,
                tracing=self._start_tracing(),
            ),
            self._make_decode,
            self._make_prefill,
        )
        self._sessions = SessionServer(
            worker_id=self.id,
            hello=self._hello,
            load=self._current_load,
            engine=self._engine,
            handler=self._service,
            serve_worker=self._service.serve_worker,
            secret=self._secret,
        )
        if self._sleeper is not None:
            self._sleeper.attach(self._service, lambda: self._stats)
        self._reporter = LoadReporter(self._current_load, self._urgent_load, self._sessions.publish_load)
        self._down.callback(self._reporter.close)
        self._engine.attach(self._service.after_pass, self._service.update, self._sessions.publish, self._take_stats)
        self._stats = await self._engine.call(Engine.stats)  # so that also the first report tells the free pages
        self._watch("a step", lambda: self._engine.pass_number, loaded.progress)
        self._watch("a chunk on the prefill lane", lambda: loaded.engine.prefill_lane_chunk_number, lambda: 0)
        await self._listen(host)
        if self._residency is not None:
            assert self._sleeper is not None
            self._down.push_async_callback(_bounded, self._residency.close, "residency")
            await self._residency.begin(self._sleeper, await self._sleeper.populate())
        await self._take_lease(host)
        log.info("%s worker %s listens on %s", self._role, self.id, without_fingerprint(self.address))

    async def _take_turn(self) -> None:
        """Waits until the model may be loaded beside others of this machine."""
        self._residency = share_device(
            self._settings,
            self.id,
            self._started_as,
            await asyncio.to_thread(self._expect_memory, self._settings),
            self._redis,
            self._secret,
            fail=lambda reason, retry_after_s: self._service.fail_all(reason, retry_after_s),
            changed=self._load_changed,
            on_failure=lambda error: self.lifecycle.stop(f"sharing the device failed: {error!r}", EXIT_RESTART),
        )
        self._down.push_async_callback(_bounded, self._residency.close, "residency")
        await self._residency.take_turn()

    def _request_arrived(self) -> None:
        if self._residency is not None:
            self._residency.request_arrived()

    def _request_given_up(self) -> None:
        if self._residency is not None:
            self._residency.request_given_up()

    def _start_tracing(self) -> "Tracing | None":
        settings = self._settings
        if not settings.otlp_endpoint:
            return None
        from cpd.common.tracing import Tracing  # and OpenTelemetry's SDK with it

        tracing = Tracing(settings.otlp_endpoint, service="cpd-worker", instance=self.id, cluster=settings.cluster)
        self._down.push_async_callback(_bounded, lambda: asyncio.to_thread(tracing.close), "sending spans")
        return tracing

    def _build(self) -> Engine:
        self._loaded = self._build_engine(self._settings)
        return self._loaded.engine

    async def _listen(self, host: str) -> None:
        self._server = grpc.aio.server(
            interceptors=[AdminKeyInterceptor(self._secret.admin_key)], options=SERVER_OPTIONS
        )
        admin = AdminServicer(self.lifecycle, self._engine, self.set_role, self._residency)
        rpc.add_AdminServicer_to_server(admin, self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        endpoint = join_address(self._settings.host, self._settings.port)
        certificate = None if is_loopback(self._settings.host) else make_certificate()
        try:
            if certificate is None:
                port = self._server.add_insecure_port(endpoint)
            else:
                credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.pem)])
                port = self._server.add_secure_port(endpoint, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error}") from None
        self.address = join_address(host, port)
        await self._server.start()
        self._streams = StreamServer(pb.RouterMessage, HELLO_BYTES, self._sessions.serve)
        self._down.push_async_callback(self._stop_serving)
        try:
            port = await self._streams.start(self._settings.host, self._settings.session_port, certificate)
        except OSError as error:
            endpoint = join_address(self._settings.host, self._settings.session_port)
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from None
        self.session_address = join_address(host, port)
        if certificate is not None:
            self.address, self.session_address = map(certificate.named_in, (self.address, self.session_address))

    async def _take_lease(self, host: str) -> None:
        member = Member(
            id=self.id,
            kind=self._started_as,
            address=self.address,
            session=self.session_address,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=self._settings.served_model_name,
        )
        settings = self._settings
        await self._down.enter_async_context(
            lease(self._redis, settings.cluster, self._secret, member, settings.lease_s, self._superseded)
        )

    # ---- while it runs ----

    async def _serve(self) -> None:
        await self.lifecycle.draining.wait()
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        # Without its memory nothing would end: then the requests go back to their routers at once.
        while not self.lifecycle.stopping.is_set() and self._service.busy and self._has_memory:
            if self.lifecycle.time_is_over:
                self._service.hand_over()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lifecycle.stopping.wait(), DRAIN_POLL_S)
        self.lifecycle.stop("drained")

    @property
    def _state(self) -> pb.State.ValueType:
        return pb.STATE_DRAINING if self.lifecycle.draining.is_set() else pb.STATE_READY

    @property
    def _has_memory(self) -> bool:
        return self._sleeper is None or self._sleeper.state.has_memory

    def _take_stats(self, update: Update) -> None:
        if update.stats is not None:
            self._stats = update.stats
            self._load_changed()

    def _load_changed(self) -> None:
        if self._reporter is not None:
            self._reporter.changed()

    def _current_load(self) -> pb.Load:
        load = load_from_stats(self._stats, self._state)
        load.role = _ROLES[self._role]
        self._service.add_load(load)
        if self._residency is not None:
            load.residency.CopyFrom(self._residency.report())
        return load

    def _urgent_load(self) -> tuple[pb.State.ValueType, Role, ModelState | None, bool]:
        busy = self._stats.running + self._stats.waiting + self._service.waiting > 0
        return self._state, self._role, self._residency.state if self._residency is not None else None, busy

    def _hello(self) -> pb.Hello:
        colocation = self._loaded.engine.colocation
        return pb.Hello(
            worker_id=self.id,
            role=_ROLES[self._started_as],
            current_role=_ROLES[self._role],
            state=self._state,
            fingerprint=self._loaded.fingerprint,
            model_digest=self._model_digest,
            epoch=self._transport.epoch,
            block_size=BLOCK_SIZE,
            num_pages=self._loaded.memory.num_pages,
            page_bytes=self._loaded.page_bytes,
            host_pages=self._loaded.engine.host_pages,
            host_page_ms=self._loaded.engine.host_page_ms,
            max_model_len=self._loaded.limits.max_model_len,
            max_num_seqs=self._loaded.engine.max_num_seqs,
            vocab_size=self._loaded.limits.vocab_size,
            dtype=self._loaded.dtype,
            device=self._loaded.device,
            transport=self._transport.name,
            transport_reason=self._transport.reason,
            profile=self._loaded.profile.model_dump_json(by_alias=True).encode(),
            token_budget=self._loaded.token_budget,
            colocate=colocation.mode,
            decode_shares=[split.decode for split in colocation.splits],
            grammars=self._grammars.supported,
        )

    def _watch(self, what: str, running: Callable[[], int], progress: Callable[[], float]) -> None:
        async def watch() -> None:
            await hang(running, progress)
            log.critical("the engine hangs: %s has made no progress for %g s", what, HANG_S)
            self.lifecycle.stop("the engine hangs", exit_code=EXIT_RESTART)

        self._down.callback(asyncio.create_task(watch(), name="engine-watch").cancel)

    def _engine_failed(self, error: BaseException) -> None:
        self.lifecycle.stop(f"the engine failed: {error!r}", exit_code=EXIT_RESTART)

    def _superseded(self) -> None:
        self.lifecycle.stop("a newer process has its id", EXIT_SUPERSEDED)

    # ---- stop ----

    async def _stop_serving(self) -> None:
        await _bounded(self._service.stop, "requests")
        await _bounded(self._sessions.flush, "the last messages", STOP_STEP_S / 4)
        failed = self.lifecycle.failed
        self._sessions.end_all("the engine failed" if failed else "the worker stops", failed=failed)
        await _bounded(lambda: self._streams.close(STOP_STEP_S / 4), "sessions")
        await _bounded(lambda: self._server.stop(STOP_STEP_S / 4), "calls")


def advertised_host(settings: WorkerSettings) -> str:
    """Returns the host name under which other processes reach this worker.

    Raises:
        ConfigError: It listens on all interfaces and has no name.
    """
    host = settings.advertise_host or settings.host
    if host in ("0.0.0.0", "::"):
        raise ConfigError(f"--host {host} needs --advertise-host: other processes must know how to reach this worker")
    return host


def _redis(url: str) -> Redis:
    if not url:
        raise ConfigError("--redis-url is needed: workers are found through Redis")
    try:
        return Redis.from_url(
            url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the lease retries
        )
    except ValueError as error:
        raise ConfigError(f"--redis-url is not a Redis URL: {error}") from None


async def _bounded(close: Callable[[], Any], what: str, timeout_s: float = STOP_STEP_S) -> None:
    """Waits for one step of a stop, with a limit: the process ends anyway."""
    try:
        await asyncio.wait_for(close(), timeout_s)
    except TimeoutError:
        log.info("gave up waiting for %s to end", what)

import asyncio
import gc
import os
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ByteSize
from redis.asyncio import Redis

from cpd.common.errors import CheckpointError, ConfigError
from cpd.common.membership import members
from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from cpd.common.settings import WorkerSettings
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from decode_worker.service import DecodeService
from deploy.redis import embedded_redis
from kvtransfer.local import LocalNetwork
from prefill_worker.service import PrefillService
from tests.engine.fakes import make_request, prompt
from tests.secret import SECRET, secret_file
from tests.waiting import DEADLINE_S, eventually
from tests.worker.client import Client
from tests.worker.cluster import opener, running
from tests.worker.fakes import Gate, fake_loader
from worker.context import EXIT_RESTART, ExpectedMemory, LoadedEngine
from worker.grpc_options import admin_metadata
from worker.worker import Worker


def worker(redis_url: str, load: Any = None, **settings: Any) -> Worker:
    given = {"redis_url": redis_url, "cluster": "test-worker", **settings}
    return Worker(
        WorkerSettings(**given),
        "combined",
        DecodeService,
        PrefillService,
        build_engine=load or fake_loader(),
        open_transport=opener(LocalNetwork(), None),
    )


async def test_a_worker_is_listed_only_while_it_serves(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        async with running("combined", redis_url, network=LocalNetwork(), cluster="listed") as w:
            (member,) = await members(redis, "listed", ClusterSecret(""))
            assert (member.id, member.kind, member.address) == (w.worker.id, "combined", w.address)
        assert await members(redis, "listed", ClusterSecret("")) == []


async def test_a_worker_ends_when_a_newer_one_has_its_id(redis_url: str) -> None:
    twins: dict[str, Any] = {"cluster": "twins", "worker_id": "twin", "network": LocalNetwork()}
    async with running("combined", redis_url, **twins) as older, running("combined", redis_url, **twins) as newer:
        assert await asyncio.wait_for(older.task, DEADLINE_S) == EXIT_SUPERSEDED
        async with Redis.from_url(redis_url) as redis:
            assert [member.address for member in await members(redis, "twins", ClusterSecret(""))] == [newer.address]
        async with Client(newer) as c:
            await c.done(await c.submit(make_request("a", prompt(20)), 1))


async def test_workers_without_a_name_get_different_ones(redis_url: str) -> None:
    assert worker(redis_url).id != worker(redis_url).id


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"redis_url": ""}, "--redis-url"),
        ({"redis_url": "localhost"}, "--redis-url is not a Redis URL"),
        ({"host": "0.0.0.0"}, "--advertise-host"),
        ({"host": "0.0.0.0", "advertise_host": "127.0.0.1"}, "its cluster needs a secret"),
        ({"host": "203.0.113.7"}, "203.0.113.7"),
    ],
)
async def test_a_worker_that_cannot_start_gives_the_reason(
    redis_url: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        await worker(**{"redis_url": redis_url, **settings}).run()


async def test_a_port_that_is_taken_is_named(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as w:
        port = int(w.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=str(port)):
            await worker(redis_url, port=port).run()


async def test_a_checkpoint_that_cannot_be_served_is_the_workers_error(redis_url: str) -> None:
    def load(settings: WorkerSettings) -> LoadedEngine:
        raise CheckpointError("a tensor is missing")

    with pytest.raises(CheckpointError, match="a tensor is missing"):
        await worker(redis_url, load).run()


async def test_a_stop_while_weights_load_ends_the_worker(redis_url: str) -> None:
    loading, never = Future[threading.Thread](), threading.Event()

    def load(settings: WorkerSettings) -> LoadedEngine:
        loading.set_result(threading.current_thread())
        never.wait(2 * DEADLINE_S)
        raise CheckpointError("too late")

    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    w = worker(redis_url, load)
    task = asyncio.create_task(w.run())
    thread = await asyncio.wrap_future(loading)
    w.lifecycle.stop("signal")
    assert await asyncio.wait_for(task, DEADLINE_S) == 0
    never.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)  # it has told the loop
    del w, task
    gc.collect()
    assert not unhandled


async def test_redis_may_be_unreachable_at_the_end(redis_url: str) -> None:
    with TemporaryDirectory(prefix="cpd-redis-") as directory, embedded_redis(Path(directory) / "r") as redis:
        async with running("combined", redis.url, network=LocalNetwork()) as w:
            redis.stop()
            assert await w.stop() == 0


async def test_health_answers_without_a_token_and_reports_draining(redis_url: str) -> None:
    gate = Gate()
    started = running(
        "combined",
        redis_url,
        network=LocalNetwork(),
        secret_file=secret_file(),
        load=fake_loader(before_step=gate.wait),
    )
    async with started as w, grpc.aio.insecure_channel(w.address) as channel, Client(w, token=SECRET) as c:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        gate.close()
        answer = await c.submit(make_request("a", prompt(20)), 1)
        await eventually(lambda: gate.held)
        await c.drain()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        gate.open()
        await c.done(answer)


async def test_administration_needs_the_admin_key(redis_url: str) -> None:
    started = running("combined", redis_url, network=LocalNetwork(), secret_file=secret_file())
    async with started as w, grpc.aio.insecure_channel(w.address) as channel:
        admin: Any = rpc.AdminStub(channel)
        for metadata in ((), admin_metadata("secret"), admin_metadata(ClusterSecret("another").admin_key)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.Drain(pb.DrainRequest(), metadata=metadata, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await admin.Drain(pb.DrainRequest(), metadata=admin_metadata(ClusterSecret(SECRET).admin_key), timeout=20)
        assert await asyncio.wait_for(w.task, 20) == EXIT_DRAINED


async def test_a_worker_announces_another_role_at_once(redis_url: str) -> None:
    started = running("combined", redis_url, network=LocalNetwork(), secret_file=secret_file())
    metadata = admin_metadata(ClusterSecret(SECRET).admin_key)
    async with (
        started as w,
        grpc.aio.insecure_channel(w.address) as channel,
        Client(w, token=SECRET) as c,
    ):
        admin: Any = rpc.AdminStub(channel)
        assert c.hello.role == c.hello.current_role == pb.ROLE_COMBINED
        await admin.SetRole(pb.SetRoleRequest(role=pb.ROLE_PREFILL), metadata=metadata, timeout=20)
        await eventually(lambda: c.load.role == pb.ROLE_PREFILL)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.SetRole(pb.SetRoleRequest(), metadata=metadata, timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with Client(w, token=SECRET, router_id="later") as later:
            assert (later.hello.role, later.hello.current_role) == (pb.ROLE_COMBINED, pb.ROLE_PREFILL)
            answer = await later.submit(make_request("a", prompt(20)), 1)
            await later.done(answer)
            assert answer.refusal is None


async def test_work_role_and_drain_are_reported_before_the_next_report_is_due(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.load_report.INTERVAL_S", 3600.0)
    monkeypatch.setattr("worker.load_report.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("worker.async_engine.STATS_INTERVAL_S", 0.0)
    gate = Gate()
    load = fake_loader(before_step=gate.wait)
    started = running("combined", redis_url, network=LocalNetwork(), load=load, secret_file=secret_file())
    metadata = admin_metadata(ClusterSecret(SECRET).admin_key)
    async with started as w, grpc.aio.insecure_channel(w.address) as channel, Client(w, token=SECRET) as c:
        await c.done(await c.submit(make_request("a", prompt(8), max_tokens=3), 1))
        gate.close()
        answer = await c.submit(make_request("b", prompt(8), max_tokens=3), 2)
        gate.open_once()
        await eventually(lambda: c.load.running == 1)
        gate.open()
        await c.done(answer)
        await eventually(lambda: c.load.running == 0)
        admin: Any = rpc.AdminStub(channel)
        await admin.SetRole(pb.SetRoleRequest(role=pb.ROLE_PREFILL), metadata=metadata, timeout=20)
        await eventually(lambda: c.load.role == pb.ROLE_PREFILL)
        await admin.SetRole(pb.SetRoleRequest(role=pb.ROLE_COMBINED), metadata=metadata, timeout=20)
        await eventually(lambda: c.load.role == pb.ROLE_COMBINED)
        await c.drain()
        await eventually(lambda: c.load.state == pb.STATE_DRAINING)


async def test_the_trace_describes_each_step(redis_url: str) -> None:
    async with (
        running("combined", redis_url, network=LocalNetwork()) as w,
        grpc.aio.insecure_channel(w.address) as channel,
        Client(w) as c,
    ):
        admin: Any = rpc.AdminStub(channel)
        assert not (await admin.Trace(pb.TraceRequest(), timeout=20)).steps
        before_s = time.time()
        await c.done(await c.submit(make_request("a", prompt(70), max_tokens=3), 1))
        trace = await admin.Trace(pb.TraceRequest(seconds=600), timeout=20)
        counts = [(step.prefill_tokens, step.decodes, step.decode_context) for step in trace.steps]
        assert counts == [(64, 0, 0), (6, 0, 0), (0, 1, 71), (0, 1, 72)]
        assert all(step.lane == pb.LANE_FULL and step.share == 1 for step in trace.steps)
        assert all(before_s - 1 < step.start_s < time.time() + 1 for step in trace.steps)


async def test_the_exit_code_of_a_drain_stays_when_it_is_cut_short(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as w:
        w.worker.lifecycle.drain("too much quarantine", EXIT_RESTART)
        assert await w.stop() == EXIT_RESTART


async def test_when_the_engine_fails_requests_end_with_the_session_and_it_says_so(redis_url: str) -> None:
    """A router that gets them back could not tell that one of them may be the cause."""

    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=fails)) as w,
        Client(w) as c,
    ):
        answer = await c.submit(make_request("a", prompt(8), max_tokens=3), 1)
        assert await asyncio.wait_for(w.task, DEADLINE_S) == EXIT_RESTART
        await eventually(lambda: c.messages[-1].HasField("end"))
        assert c.messages[-1].end == pb.End(reason="the engine failed", failed=True)
        assert answer.refusal is None


async def test_a_worker_that_was_told_to_stop_gives_its_requests_back(redis_url: str) -> None:
    gate = Gate()
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait)) as w,
        Client(w) as c,
    ):
        gate.close()
        answer = await c.submit(make_request("a", prompt(8), max_tokens=3), 1)
        await eventually(lambda: gate.held)
        w.worker.lifecycle.stop("signal")
        await eventually(lambda: c.messages[-1].HasField("end"))
        gate.open()
        assert c.messages[-1].end == pb.End(reason="the worker stops")
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE


async def test_a_worker_on_a_shared_device_waits_for_its_turn_and_says_that_it_serves(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        ledger = Ledger(redis, "shared", ClusterSecret(SECRET), socket.gethostname())
        await ledger.start(1 << 40)
        given: dict[str, Any] = {"cluster": "shared", "device_memory": 1 << 40, "secret_file": secret_file()}
        async with running("combined", redis_url, network=LocalNetwork(), **given) as w, Client(w, token=SECRET) as c:
            assert c.load.residency.state == pb.Residency.STATE_SERVING
            look = await ledger.look()
            assert look.record is not None
            (entry,) = look.record.entries
            assert (entry.id, entry.role, entry.owner.pid) == (w.worker.id, "combined", os.getpid())
            memory = w.worker._loaded.model_memory
            assert memory is not None
            assert entry.memory_bytes == memory.num_bytes > 0
            await c.done(await c.submit(make_request("a", prompt(20)), 1))


async def test_a_worker_that_can_never_be_on_its_device_says_so_before_it_loads(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        await Ledger(redis, "too-large", ClusterSecret(""), socket.gethostname()).start(1 << 20)
    w = Worker(
        WorkerSettings(redis_url=redis_url, cluster="too-large", device_memory=ByteSize(1 << 20)),
        "combined",
        DecodeService,
        PrefillService,
        build_engine=lambda settings: pytest.fail("it was loaded"),
        open_transport=opener(LocalNetwork(), None),
        expect_memory=lambda settings: ExpectedMemory(1 << 30, "f"),
    )
    with pytest.raises(ConfigError, match=r"can never be awake: it takes 1\.00 GiB, and the device has 0\.00 GiB"):
        await w.run()


async def test_all_requests_of_a_model_that_cannot_wake_fail_with_the_reason(redis_url: str) -> None:
    gate = Gate()
    load = fake_loader(before_step=gate.wait)
    async with running("combined", redis_url, network=LocalNetwork(), load=load) as w, Client(w) as c:
        gate.close()
        answers = [await c.submit(make_request(name, prompt(20)), number) for number, name in enumerate("ab")]
        await eventually(lambda: gate.held)
        w.worker._service.fail_all("its checkpoint is gone", 30.0)
        await eventually(lambda: all(answer.refusal is not None for answer in answers))
        gate.open()
        for answer in answers:
            assert answer.refusal is not None
            assert (answer.refusal.kind, answer.refusal.message) == (pb.Refusal.KIND_FAILED, "its checkpoint is gone")
            assert answer.refusal.retry_after_ms == 30_000
        await c.balanced()

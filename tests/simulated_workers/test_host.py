"""Several workers in one process, with real gRPC, leases and engines, and simulated devices and pages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest
from redis.asyncio import Redis

from cpd.common.errors import ConfigError
from cpd.common.membership import Member, members
from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from cpd.common.settings import Role, WorkerSettings
from cpd.common.trust import ClusterSecret
from cpd.performance.model import Profile
from cpd.rpc import cpd_pb2 as pb
from engine.model.config import load_config
from kvtransfer.local import LocalNetwork
from models import tiny
from simulated_workers.engine import make_loader
from simulated_workers.host import Host
from tests.engine.fakes import make_request, prompt
from tests.waiting import DEADLINE_S
from tests.worker.client import Client

WORKERS: list[tuple[Role, str]] = [("combined", "combined-0"), ("combined", "combined-1"), ("prefill", "prefill-0")]
_clusters = count()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits until `holds` returns True."""
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():  # noqa: ASYNC110 - Redis sends no event
            await asyncio.sleep(0.01)


class Running:
    """A host with some workers."""

    def __init__(self, redis: Redis, url: str, kv_memory: str = "64MiB", cluster: str = "") -> None:
        self.cluster = cluster or f"simulated-{next(_clusters)}"
        self.host = Host(make_loader(Profile.load("instant"), load_config(tiny.CHECKPOINT)), LocalNetwork("simulated"))
        self.tasks: list[asyncio.Task[int]] = []
        self._redis = redis
        self._given = {"cluster": self.cluster, "redis_url": url, "kv_memory": kv_memory}

    def start(self, role: Role, name: str) -> None:
        settings = WorkerSettings.load({**self._given, "worker_id": name})
        self.tasks.append(asyncio.create_task(self.host.run(settings, role)))

    async def has(self, workers: int) -> bool:
        return len(await self.members()) == workers

    async def members(self) -> dict[str, Member]:
        return {member.id: member for member in await members(self._redis, self.cluster, ClusterSecret(""))}

    async def stop(self) -> None:
        self.host.stop("the test ends")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self.tasks)


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Running]:
    """Runs two combined workers and a prefill worker, which have their leases."""
    async with Redis.from_url(url) as redis:
        it = Running(redis, url)
        for role, name in WORKERS:
            it.start(role, name)
        await until(lambda: it.has(len(WORKERS)))
        yield it
        await it.stop()
        assert not await it.members()


async def test_both_routes_give_the_same_tokens(redis_url: str) -> None:
    async with running(redis_url) as it:
        found = await it.members()
        prefill = pb.PrefillCandidate(worker_id="prefill-0", address=found["prefill-0"].session)
        request = make_request("r", prompt(500), max_tokens=20)
        async with Client(found["combined-0"]) as one, Client(found["combined-1"]) as other:
            assert (one.hello.transport, one.hello.dtype) == ("simulated", "simulated")
            local = await one.submit(request, 1)
            remote = await other.submit(request, 1, candidates=[prefill])
            await one.done(local)
            await other.done(remote)
            assert remote.prefilled[0].prefill_worker == "prefill-0"
            assert local.tokens == remote.tokens
            assert len(local.tokens[0]) == 20
            await one.balanced()
            await other.balanced()


async def test_every_worker_has_a_lease_and_a_port_of_its_own(redis_url: str) -> None:
    async with running(redis_url) as it:
        found = await it.members()
        assert {(member.kind, member.id) for member in found.values()} == set(WORKERS)
        assert len({member.address for member in found.values()}) == len(WORKERS)


async def test_a_worker_that_was_drained_is_gone_and_the_others_go_on(redis_url: str) -> None:
    async with running(redis_url) as it:
        before = await it.members()
        async with Client(before["combined-0"]) as drained, Client(before["combined-1"]) as other:
            await drained.drain()
            async with asyncio.timeout(DEADLINE_S):
                assert await it.tasks[0] == EXIT_DRAINED
            assert "combined-0" not in await it.members()
            answer = await other.submit(make_request("r", prompt(40)), 1)
            await other.done(answer)
        assert (await it.members())["combined-1"] == before["combined-1"]


async def test_all_workers_end_for_good_when_a_newer_process_has_the_id_of_one(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis, running(redis_url) as older:
        newer = Running(redis, redis_url, cluster=older.cluster)
        newer.start("combined", "combined-0")
        async with asyncio.timeout(DEADLINE_S):
            exit_codes = await asyncio.gather(*older.tasks)
        assert sorted(exit_codes) == [0, 0, EXIT_SUPERSEDED]
        assert list(await newer.members()) == ["combined-0"]
        await newer.stop()


async def test_a_worker_that_cannot_start_says_why(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        it = Running(redis, redis_url, kv_memory="1KiB")
        it.start("combined", "combined-0")
        with pytest.raises(ConfigError, match="kv-memory"):
            await asyncio.wait_for(it.tasks[0], DEADLINE_S)

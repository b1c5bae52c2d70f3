"""How a router learns of workers, and what it makes of what they say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from cpd.blocks import extend_hashes, hash_root
from cpd.membership import Member, lease
from cpd.rpc import cpd_pb2 as pb
from deploy.redis import embedded_redis
from router import sessions
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import FakeWorker

MODEL = "small-model"
PROMPT = [5] * 64
OPTIONS = sessions._CHANNEL_OPTIONS
CHAIN = extend_hashes(hash_root(b"model"), PROMPT)


def _short(*blocks: int) -> bytes:
    return b"".join(CHAIN[block][:8] for block in blocks)


async def _complete(router: Router, prompt: list[int] = PROMPT) -> str:
    """Runs a request; the worker that decoded it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    response = await router.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    worker: str = response.headers["x-cpd-decode-worker"]
    return worker


async def _has(router: Router, worker_id: str, **fields: Any) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and fields.items() <= worker.items()


async def _lacks(router: Router, worker_id: str) -> bool:
    return await router.worker(worker_id) is None


async def _refused(router: Router, worker_id: str, reason: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and worker["state"] == "refused" and reason in worker["reason"]


class TestCache:
    async def test_requests_go_where_their_prefix_is_cached(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        cold = await start_worker(says("fox"), worker_id="cold")
        warm = await start_worker(says("fox"), worker_id="warm", cached=_short(0, 1))
        router = await start_router(cold, warm)
        assert {await _complete(router) for _ in range(5)} == {"warm"}
        cold.send(_events(8, added=_short(0, 1, 2)))
        await eventually(lambda: _has(router, "cold", cached_blocks=3))
        assert {await _complete(router) for _ in range(5)} == {"cold"}
        cold.send(_events(9, removed=_short(1)))
        await eventually(lambda: _has(router, "cold", cached_blocks=2))
        assert {await _complete(router) for _ in range(5)} == {"warm"}

    async def test_the_cached_part_decides_between_local_and_remote(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"), cached=_short(0, 1))
        prefill = await start_worker(worker_id="prefill-0", kind="prefill")
        router = await start_router(worker, prefill, long_prefill_tokens=32)
        await _complete(router)
        await _complete(router, [*PROMPT, 6])
        assert [len(submit.prefill_candidates) for submit in worker.submits] == [0, 1]

    async def test_a_gap_in_the_events_means_a_new_session(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"), cached=_short(0))
        router = await start_router(worker)
        worker.cached = _short(0, 1, 2)
        worker.send(_events(9, added=_short(3)))
        await eventually(lambda: _has(router, "combined-0", state="ready", cached_blocks=3))
        assert worker.hellos == ["router-a", "router-a"]

    async def test_nonsense_isolates_the_worker_that_sent_it(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        good, bad = [await start_worker(says("fox"), worker_id=name) for name in ("good", "bad")]
        router = await start_router(good, bad)
        bad.snapshot_may_go.clear()
        bad.send(_events(8, added=b"odd"))
        await eventually(lambda: _has(router, "bad", state="syncing"))
        assert {await _complete(router) for _ in range(5)} == {"good"}
        assert good.hellos == ["router-a"]


def _events(number: int, *, added: bytes = b"", removed: bytes = b"") -> pb.WorkerMessage:
    events = [pb.CacheEvent(hashes=added)] if added else []
    events += [pb.CacheEvent(hashes=removed, removed=True)] if removed else []
    return pb.WorkerMessage(cache=pb.CacheEvents(number=number, events=events))


class TestRefused:
    async def test_a_wrong_cluster_token_is_told(self, start_router: StartRouter, start_worker: StartWorker) -> None:
        await start_worker(token="another")
        router = await start_router()
        await eventually(lambda: _told(router, "UNAUTHENTICATED: wrong cluster token"))

    @pytest.mark.parametrize(
        ("hello", "reason"),
        [
            ({"fingerprint": b"other"}, "another model"),
            ({"block_size": 32}, "blocks of 32 tokens"),
            ({"role": pb.ROLE_PREFILL}, "its session ROLE_PREFILL"),
            ({"worker_id": "somebody"}, "is 'somebody'"),
        ],
    )
    async def test_a_worker_that_does_not_fit_is_refused_with_a_reason(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, hello: dict[str, Any], reason: str
    ) -> None:
        router = await start_router(await start_worker(says("fox")))
        odd = await start_worker(worker_id="odd", hello=hello)
        await eventually(lambda: _refused(router, "odd", reason))
        assert {await _complete(router) for _ in range(3)} == {"combined-0"}
        assert odd.submits == []

    async def test_the_next_model_may_come_when_all_of_the_last_are_gone(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        old = await start_worker(says("fox"), worker_id="old")
        router = await start_router(old)
        new = await start_worker(says("fox"), worker_id="new", hello={"fingerprint": b"new model"})
        await eventually(lambda: _refused(router, "new", "another model"))
        await old.kill()
        await router.knows(new)
        assert await _complete(router) == "new"


async def _told(router: Router, reason: str) -> bool:
    worker = await router.worker("combined-0")
    return worker is not None and reason in (worker["reason"] or "")


class TestMembership:
    async def test_a_worker_that_restarts_under_its_name_is_a_new_one(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        first = await start_worker(says("fox"), cached=_short(0))
        router = await start_router(first)
        await first.kill()
        second = await start_worker(says("fox"))
        await eventually(lambda: _has(router, "combined-0", state="ready", address=second.address, cached_blocks=0))
        assert await _complete(router) == "combined-0"
        assert len(second.submits) == 1

    async def test_a_worker_whose_lease_and_session_are_gone_is_forgotten(
        self, start_router: StartRouter, redis: Redis, cluster: str
    ) -> None:
        router = await start_router()
        async with FakeWorker(redis, cluster=cluster) as worker:
            await router.knows(worker)
        await eventually(lambda: _lacks(router, "combined-0"))

    async def test_a_lease_without_a_process_is_shown_as_connecting(
        self, start_router: StartRouter, redis: Redis, cluster: str
    ) -> None:
        router = await start_router()
        async with lease(redis, cluster, Member("ghost", "combined", "127.0.0.1:1", "h", 1, 1), ttl_s=5):
            await eventually(lambda: _has(router, "ghost", state="connecting"))
            assert (await router.http.get("/readyz")).status_code == 503

    async def test_a_draining_worker_gets_nothing_new(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        draining = await start_worker(says("fox"), worker_id="draining", cached=_short(0, 1, 2))
        router = await start_router(draining, await start_worker(says("fox")))
        draining.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))
        await eventually(lambda: _has(router, "draining", state="draining"))
        assert {await _complete(router) for _ in range(3)} == {"combined-0"}

    async def test_a_worker_that_is_silent_is_lost(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        redis: Redis,
        cluster: str,
        says: Says,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        quick = [(name, 300 if "keepalive_time" in name or "timeout" in name else value) for name, value in OPTIONS]
        monkeypatch.setattr(sessions, "_CHANNEL_OPTIONS", quick)
        async with silenceable(redis, cluster) as (worker, silence):
            router = await start_router(worker)
            call = asyncio.create_task(_complete(router))
            await eventually(lambda: _got(worker.submits))
            await start_worker(says("fox"), worker_id="combined-1")
            silence.set()
            assert await call == "combined-1"

    async def test_serving_goes_on_while_redis_is_away(
        self, start_router: StartRouter, says: Says, tmp_path: Path, cluster: str
    ) -> None:
        with embedded_redis(tmp_path / "r") as server:
            async with Redis.from_url(server.url) as client, FakeWorker(client, says("fox"), cluster=cluster) as worker:
                router = await start_router(worker, redis_url=server.url)
                assert (await router.cluster())["redis"] == {"ok": True, "error": None}
                server.stop()
                await eventually(lambda: _redis_is(router, False))
                assert await _complete(router) == "combined-0"
                assert (await router.http.get("/readyz")).status_code == 200
                server.start()
                await eventually(lambda: _redis_is(router, True))
                assert await _complete(router) == "combined-0"

    async def test_routers_see_each_other(self, start_router: StartRouter, cluster: str, redis: Redis) -> None:
        router = await start_router()
        async with lease(redis, cluster, Member("router-b", "router", "127.0.0.1:2", "h", 1, 1), ttl_s=5):
            await eventually(lambda: _routers_are(router, ["router-a", "router-b"]))
        await eventually(lambda: _routers_are(router, ["router-a"]))


@contextlib.asynccontextmanager
async def silenceable(redis: Redis, cluster: str) -> AsyncIterator[tuple[FakeWorker, asyncio.Event]]:
    """A worker behind a connection that swallows everything once the event is set."""
    silence = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65_536):
                if not silence.is_set():
                    writer.write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = worker.address.split(":")
        there, to = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, to), pump(there, writer), return_exceptions=True)

    async with FakeWorker(redis, cluster="nobody's") as worker:
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, lease(redis, cluster, Member(worker.id, "combined", address, "h", 1, 1), ttl_s=5):
            yield worker, silence


async def _got(submits: list[pb.Submit]) -> bool:
    return bool(submits)


async def _redis_is(router: Router, ok: bool) -> bool:
    return bool((await router.cluster())["redis"]["ok"] is ok)


async def _routers_are(router: Router, ids: list[str]) -> bool:
    return [member["id"] for member in (await router.cluster())["routers"]] == ids


async def test_the_cluster_shows_what_a_worker_reports(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker(hello={"epoch": 77, "page_bytes": 4096})
    router = await start_router(worker)
    load = pb.Load(
        state=pb.STATE_READY,
        running=1,
        waiting=2,
        waiting_tokens=3,
        free_pages=4,
        cached_pages=5,
        used_pages=6,
        reserved_pages=7,
        quarantined_pages=8,
        preemptions=9,
        prefill_tokens=10,
        decode_tokens=11,
        cached_tokens=12,
        fills={"completed": 13, "failed": 1},
    )
    worker.send(pb.WorkerMessage(load=load))
    expected = {
        "running": 1,
        "waiting": 2,
        "waiting_tokens": 3,
        "pages": {"free": 4, "cached": 5, "used": 6, "reserved": 7, "quarantined": 8},
        "preemptions": 9,
        "prefill_tokens": 10,
        "decode_tokens": 11,
        "cached_tokens": 12,
        "fills": {"completed": 13, "failed": 1},
    }
    await eventually(lambda: _has(router, "combined-0", load=expected))
    shown = await router.worker("combined-0") or {}
    assert (shown["role"], shown["address"], shown["state"]) == ("combined", worker.address, "ready")
    assert (shown["info"]["epoch"], shown["info"]["page_bytes"], shown["info"]["num_pages"]) == (77, 4096, 100)
    text = (await router.http.get("/metrics")).text
    assert 'cpd_worker_pages{role="combined",state="quarantined",worker="combined-0"} 8.0' in text
    assert 'cpd_worker_fills_total{outcome="completed",role="combined",worker="combined-0"} 13.0' in text


async def test_many_workers_come_and_go(start_router: StartRouter, redis: Redis, cluster: str, says: Says) -> None:
    router = await start_router()

    async def live(number: int) -> None:
        async with FakeWorker(redis, says("fox"), cluster=cluster, worker_id=f"w{number}", cached=_short(0)) as worker:
            await router.knows(worker)

    await asyncio.gather(*(live(number) for number in range(12)))
    await eventually(lambda: _empty(router))


async def _empty(router: Router) -> bool:
    return not (await router.cluster())["workers"]

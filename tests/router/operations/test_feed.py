"""The cluster's state as a stream: one snapshot for all, and none while nobody listens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import orjson
import pytest

from cpd.common.trust import ClusterSecret
from router.operations import feed as feeds
from router.operations.feed import UNCHANGED, ClusterFeed, Listener
from router.operations.overview import Overview
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.secret import SECRET

ADMIN_KEY = ClusterSecret(SECRET).admin_key


class FakeOverview:
    """Describes a cluster whose only worker is a number."""

    router_id = "router-a"

    def __init__(self) -> None:
        self.made = 0
        self.asked = 0
        self.worker = "0"
        self.peers_see: dict[str, Any] = {}
        self.fails = False

    async def own(self) -> dict[str, Any]:
        self.made += 1
        if self.fails:
            raise RuntimeError("a bug")
        return _status(self.worker)

    async def peers(self, authorization: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        assert authorization == b"Bearer admin"
        self.asked += 1
        return self.peers_see, {"router-c": "no answer"}


def _status(*workers: str) -> dict[str, Any]:
    return {
        "ready": True,
        "trusted": True,
        "workers": [{"id": worker, "routers": {}} for worker in workers],
        "routers": [{"id": router} for router in ("router-a", "router-b", "router-c")],
        "waiting": [],
        "events": [],
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD_S", 0.01)
    monkeypatch.setattr(feeds, "BYTES_PER_S", 1 << 30)


@pytest.fixture
def overview() -> FakeOverview:
    return FakeOverview()


@pytest.fixture
async def ended() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def feed(overview: FakeOverview, ended: asyncio.Event) -> ClusterFeed:
    return ClusterFeed(cast(Overview, overview), b"Bearer admin", ended)


@contextlib.contextmanager
def _listening(feed: ClusterFeed, number: int) -> Iterator[list[Listener]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(feed.listen()) for _ in range(number)]


async def _document(listener: Listener) -> dict[str, Any]:
    """The next snapshot that differs from the last one."""
    while (event := await listener.next()) == UNCHANGED:
        pass
    assert event is not None
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    document: dict[str, Any] = orjson.loads(event[6:])
    return document


async def test_all_listeners_get_the_same_snapshot(feed: ClusterFeed) -> None:
    with _listening(feed, 50) as listeners:
        events = await asyncio.gather(*(listener.next() for listener in listeners))
        assert len({id(event) for event in events}) == 1


async def test_a_snapshot_that_did_not_change_is_a_comment(feed: ClusterFeed, overview: FakeOverview) -> None:
    with _listening(feed, 1) as (listener,):
        assert (await _document(listener))["workers"][0]["id"] == "0"
        assert await listener.next() == UNCHANGED
        overview.worker = "1"
        assert (await _document(listener))["workers"][0]["id"] == "1"


async def test_a_slow_listener_misses_snapshots_and_holds_nobody_up(feed: ClusterFeed, overview: FakeOverview) -> None:
    with _listening(feed, 2) as (slow, fast):
        await asyncio.gather(slow.next(), fast.next())
        for number in range(1, 6):
            overview.worker = str(number)
            assert (await _document(fast))["workers"][0]["id"] == str(number)
        assert (await _document(slow))["workers"][0]["id"] == "5"


async def test_nothing_is_made_while_nobody_listens(feed: ClusterFeed, overview: FakeOverview) -> None:
    for _ in range(2):
        with _listening(feed, 1) as (listener,):
            await listener.next()
        made, asked = overview.made, overview.asked
        await asyncio.sleep(0.1)
        assert (overview.made, overview.asked) == (made, asked)


async def test_a_later_listener_gets_no_old_snapshot(feed: ClusterFeed, overview: FakeOverview) -> None:
    with _listening(feed, 1) as (listener,):
        await listener.next()
    overview.worker = "later"
    with _listening(feed, 1) as (listener,):
        assert (await _document(listener))["workers"][0]["id"] == "later"


async def test_snapshots_of_large_clusters_come_less_often(
    feed: ClusterFeed, overview: FakeOverview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "BYTES_PER_S", 1)  # the next one is seconds away
    with _listening(feed, 1) as (listener,):
        await listener.next()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listener.next(), 0.2)
        assert overview.made == 1


async def test_what_other_routers_see_is_merged_but_brings_back_no_worker(
    feed: ClusterFeed, overview: FakeOverview
) -> None:
    seen = _status("0", "gone")
    for worker in seen["workers"]:
        worker["routers"] = {"router-b": {"sequences": 3}}
    overview.peers_see = {"router-b": seen}
    with _listening(feed, 1) as (listener,):
        for _ in range(3):  # the same answer is merged each time
            document = await _document(listener)
            assert [(one["id"], one["routers"]) for one in document["workers"]] == [
                ("0", {"router-b": {"sequences": 3}})
            ]
            assert [(one["ready"], one["error"]) for one in document["routers"]] == [
                (True, None),
                (True, None),
                (False, "no answer"),
            ]
            overview.worker = "other"
            assert [one["id"] for one in (await _document(listener))["workers"]] == ["other"]
            overview.worker = "0"


async def test_streams_end_when_the_router_drains(feed: ClusterFeed, ended: asyncio.Event) -> None:
    with _listening(feed, 2) as listeners:
        for listener in listeners:
            await listener.next()
        ended.set()
        while any([await listener.next() for listener in listeners]):
            pass
    with _listening(feed, 1) as (late,):
        assert await late.next() is None


async def test_a_listener_that_hangs_up_stops_waiting(feed: ClusterFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD_S", 60.0)
    with _listening(feed, 1) as (listener,):
        await listener.next()
        waiting = asyncio.create_task(listener.next())
        await asyncio.sleep(0)
        listener.hang_up()
        assert await waiting is None


async def test_an_error_ends_the_streams_and_later_ones_work(
    feed: ClusterFeed, overview: FakeOverview, caplog: pytest.LogCaptureFixture
) -> None:
    overview.fails = True
    with _listening(feed, 1) as (listener,):
        assert await listener.next() is None
        overview.fails = False
        with _listening(feed, 1) as (second,):
            assert (await _document(second))["workers"]
    assert "the cluster's state could not be described" in caplog.text


class TestEndpoint:
    @pytest.fixture
    async def router(self, start_router: StartRouter, start_worker: StartWorker, says: Says) -> Router:
        return await start_router(await start_worker(says("fox")))

    async def test_a_lost_worker_is_shown_with_its_events(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"))
        router = await start_router(worker)
        async with _stream(router) as snapshots:
            first = await anext(snapshots)
            assert [(one["id"], one["state"]) for one in first["workers"]] == [("combined-0", "ready")]
            assert [(one["kind"], one["worker"], one["router"]) for one in first["events"]] == [
                ("joined", "combined-0", "router-a")
            ]
            await worker.kill()
            async for snapshot in snapshots:
                if not snapshot["workers"] or snapshot["workers"][0]["state"] != "ready":
                    break
            last = snapshot["events"][-1]
            assert (last["kind"], last["worker"], last["requests"]) == ("crashed", "combined-0", 0)

    async def test_it_is_for_admins_only(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Any
    ) -> None:
        (tmp_path / "keys.yaml").write_text("- key: user\n")
        worker = await start_worker(says("fox"))
        router = await start_router(worker, api_key=["plain"], api_key_file=tmp_path / "keys.yaml")
        for key, status in (("user", 403), ("wrong", 401)):
            answer = await router.http.get("/cluster/live", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
        async with _stream(router) as snapshots:
            assert (await anext(snapshots))["cluster"]

    async def test_a_client_that_goes_away_is_no_listener_any_more(self, router: Router) -> None:
        async with _stream(router) as snapshots:
            await anext(snapshots)

        async def nobody() -> bool:
            return all(task.get_name() != "cluster-feed" for task in asyncio.all_tasks())

        await eventually(nobody)

    async def test_a_drain_ends_the_stream_and_refuses_new_ones(self, router: Router) -> None:
        async with _stream(router) as snapshots:
            await anext(snapshots)
            own = await router.own_lease()
            async with httpx.AsyncClient(base_url=f"http://{own['admin']}", timeout=30) as operator:
                await operator.post("/drain", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            async with asyncio.timeout(30):
                async for _ in snapshots:
                    pass
            assert (await router.http.get("/cluster/live")).status_code == 503
            counted = 'cpd_request_errors_total{code="service_unavailable"} 0.0'  # the page asks until it is ready
            assert counted in (await router.http.get("/metrics")).text


@contextlib.asynccontextmanager
async def _stream(router: Router) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The snapshots of `GET /cluster/live`, until the stream ends."""

    async def snapshots(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield orjson.loads(line[6:])

    async with router.http.stream("GET", "/cluster/live") as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        yield snapshots(response)

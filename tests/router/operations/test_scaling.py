"""An operator asks `cpd up` for other numbers of processes over the public port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from cpd.common.scaling import ScaleRequest, ScalingMailbox, ScalingReport
from cpd.common.trust import ClusterSecret
from router.operations import scaling
from tests.router.conftest import Router, StartRouter, StartWorker, eventually
from tests.secret import SECRET

REPORT: ScalingReport = {
    "launch": "this one",
    "models": [{"model": "", "combined": 1, "prefill": 0}],
    "routers": 1,
    "changing": False,
    "request": "",
    "step": "",
    "error": "",
}


class Launcher:
    """Reports as `cpd up` does, and takes requests.

    Attributes:
        report: What it reports.
        requests: What it has taken.
    """

    def __init__(self, mailbox: ScalingMailbox) -> None:
        self._mailbox = mailbox
        self.report = REPORT.copy()
        self.requests: list[ScaleRequest] = []

    async def run(self, ended: asyncio.Event) -> None:
        """Runs until `ended` is set: the Redis client can swallow a cancellation."""
        while not ended.is_set():
            request = await self._mailbox.read_request()
            if request is not None and request["id"] != self.report["request"]:
                self.requests.append(request)
                self.report["request"] = request["id"]
            await self._mailbox.write_report(self.report)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def launching(redis: Redis, cluster: str, secret: str = SECRET) -> AsyncIterator[Launcher]:
    """A launcher that runs while the context is open."""
    launcher = Launcher(ScalingMailbox(redis, cluster, ClusterSecret(secret)))
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(launcher.run(ended))
        try:
            yield launcher
        finally:
            ended.set()


@pytest.fixture
async def router(start_router: StartRouter, start_worker: StartWorker) -> Router:
    """A router with a worker, and a key that may do everything."""
    return await start_router(await start_worker(), api_key=["operator"])


async def _reports(router: Router) -> bool:
    return (await router.cluster())["scaling"] is not None


async def _scale(router: Router, **wanted: Any) -> httpx.Response:
    return await router.http.post("/cluster/scale", params=wanted)


async def test_the_launcher_gets_the_numbers_and_what_it_says_is_shown(
    router: Router, redis: Redis, cluster: str
) -> None:
    async with launching(redis, cluster) as launcher:
        await eventually(lambda: _reports(router))
        assert (await router.cluster())["scaling"]["models"] == REPORT["models"]
        answer = await _scale(router, combined=2, prefill=0, model="large")
        assert (answer.status_code, answer.json()) == (200, {"status": "changing"})
        (request,) = launcher.requests
        assert request == {
            "id": request["id"],
            "launch": "this one",
            "model": "large",
            "combined": 2,
            "prefill": 0,
            "router": None,
        }
        launcher.report["error"] = "no room"

        async def told() -> bool:
            return bool((await router.cluster())["scaling"]["error"] == "no room")

        await eventually(told)


async def test_a_cluster_that_is_being_changed_is_left_alone(router: Router, redis: Redis, cluster: str) -> None:
    async with launching(redis, cluster) as launcher:
        launcher.report["changing"] = True
        await eventually(lambda: _reports(router))
        answer = await _scale(router, combined=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cluster_changes")
        assert launcher.requests == []


async def test_without_a_launcher_there_is_nothing_to_ask(router: Router) -> None:
    assert not await _reports(router)
    answer = await _scale(router, routers=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_launcher")


async def test_what_no_process_of_the_cluster_has_written_is_no_launcher(
    router: Router, redis: Redis, cluster: str
) -> None:
    async with launching(redis, cluster, "another secret, which nobody knows") as launcher:
        answer = await _scale(router, routers=2)
        assert (answer.status_code, launcher.requests) == (409, [])


async def test_a_launcher_that_does_not_take_the_request_is_said(
    router: Router, redis: Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "REQUEST_S", 0.2)
    await ScalingMailbox(redis, cluster, ClusterSecret(SECRET)).write_report(REPORT)
    answer = await _scale(router, routers=2)
    assert (answer.status_code, "does not answer" in answer.json()["error"]["message"]) == (503, True)


@pytest.mark.parametrize("wanted", [{"combined": 0}, {"routers": 0}, {"prefill": -1}, {"combined": 1025}, {}])
async def test_numbers_that_can_not_be_are_refused(router: Router, wanted: dict[str, int]) -> None:
    answer = await _scale(router, **wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wanted), None))

"""Several routers of one cluster give one answer."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from redis.asyncio import Redis

from cpd.common.membership import Member, lease
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.operations import peer_routers
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer, FakeWorker
from tests.secret import SECRET

TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 3}


@pytest.fixture
async def pair(start_router: StartRouter, start_worker: StartWorker, says: Says) -> tuple[Router, Router]:
    """Two routers that know of each other, with one worker."""
    return await _start_pair(start_router, await start_worker(says("the fox")))


async def _start_pair(start_router: StartRouter, worker: FakeWorker, **settings: Any) -> tuple[Router, Router]:
    routers = await start_router(worker, **settings), await start_router(worker, name="router-b", **settings)

    async def know_each_other() -> bool:
        clusters = [await router.cluster() for router in routers]
        return all([one["id"] for one in cluster["routers"]] == ["router-a", "router-b"] for cluster in clusters)

    await eventually(know_each_other)
    return routers


async def test_each_router_has_its_own_metrics_at_the_port_that_the_targets_name(pair: tuple[Router, Router]) -> None:
    for router, requests in zip(pair, (2, 3), strict=True):
        for _ in range(requests):
            assert (await router.http.post("/v1/completions", json=TEXT)).status_code == 200
    for router in pair:
        response = await router.http.get("/metrics/targets")
        assert response.headers["content-type"] == "application/json"
        groups = {group["labels"]["router"]: group["targets"] for group in response.json()}
        for (name, (target,)), requests in zip(sorted(groups.items()), (2, 3), strict=True):
            async with httpx.AsyncClient(timeout=30) as client:
                lines = (await client.get(f"http://{target}/metrics")).text.splitlines()
            for line in (
                f'cpd_requests_total{{outcome="completed",route="local"}} {requests}.0',
                f'cpd_ttft_seconds_count{{route="local"}} {requests}.0',
                f'cpd_worker_live{{role="combined",router="{name}",worker="combined-0"}} 1.0',
            ):
                assert line in lines
            (own,) = [one for one, router_id in zip(pair, ("router-a", "router-b"), strict=True) if router_id == name]
            assert f'cpd_requests_total{{outcome="completed",route="local"}} {requests}.0' in await _metrics(own)


async def _metrics(router: Router) -> list[str]:
    return (await router.http.get("/metrics")).raise_for_status().text.splitlines()


async def test_the_cluster_shows_each_routers_view_of_a_worker(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    proceed = asyncio.Event()

    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        await proceed.wait()
        async for output in says("fox")(submit):
            yield output

    worker = await start_worker(script)
    first, second = await _start_pair(start_router, worker)
    call = asyncio.create_task(second.http.post("/v1/completions", json=TEXT))

    async def submitted() -> bool:
        return bool(worker.submits)

    await eventually(submitted)
    for router in (first, second):
        cluster = await router.cluster()
        (shown,) = cluster["workers"]
        assert {name: (one["state"], one["sequences"]) for name, one in shown["routers"].items()} == {
            "router-a": ("ready", 0),
            "router-b": ("ready", 1),
        }
        assert [(one["id"], one["ready"], one["error"]) for one in cluster["routers"]] == [
            ("router-a", True, None),
            ("router-b", True, None),
        ]
    proceed.set()
    assert (await call).status_code == 200


async def test_a_request_is_found_whichever_router_is_asked(pair: tuple[Router, Router]) -> None:
    first, second = pair
    await second.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "a/b?c d"})
    await second.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "a/b"})
    for router in pair:
        told = (await router.http.get("/requests/a/b")).raise_for_status().json()
        assert [one["router"] for one in told["placements"]] == ["router-b"]
        assert told["missing"] == {}
    assert (await first.http.get("/requests/nobody's")).status_code == 404


@pytest.mark.parametrize("request_id", ["../usage", "..", "./mine", "a//b", "a+b=c"])
async def test_a_request_is_found_whatever_its_id(pair: tuple[Router, Router], request_id: str) -> None:
    first, second = pair
    path = f"/requests/{quote(request_id, safe='').replace('.', '%2E')}"  # the client resolves dots, too
    assert (await first.http.get(path)).status_code == 404
    await second.http.post("/v1/completions", json=TEXT, headers={"x-request-id": request_id})
    assert (await first.http.get(path)).raise_for_status().json()["id"] == request_id


async def test_an_admin_port_answers_for_its_router_alone(pair: tuple[Router, Router]) -> None:
    first, second = pair
    await second.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
    ports = {one["id"]: one["admin"] for one in (await first.cluster())["routers"]}
    for router_id, requests in (("router-a", 0), ("router-b", 1)):
        async with httpx.AsyncClient(base_url=f"http://{ports[router_id]}", timeout=30) as client:
            lines = (await client.get("/metrics")).text.splitlines()
            assert (f'cpd_requests_total{{outcome="completed",route="local"}} {requests:.1f}' in lines) == requests
            (worker,) = (await client.get("/cluster")).json()["workers"]
            assert list(worker["routers"]) == [router_id]
            assert (await client.get("/requests/mine")).status_code == (200 if requests else 404)
            assert (await client.get("/livez")).status_code == (await client.get("/readyz")).status_code == 200
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 404


@pytest.fixture(params=["stopped", "silent"])
async def missing(
    request: pytest.FixtureRequest, redis: Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """A router with a lease that does not answer: no process listens, or it does not read."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            monkeypatch.setattr(peer_routers, "ANSWER_S", 1.0)
            listener.listen()
        admin = f"127.0.0.1:{listener.getsockname()[1]}"
        async with lease(
            redis,
            cluster,
            ClusterSecret(SECRET),
            Member("gone", "router", "127.0.0.1:1", "h", 1, admin=admin),
            30,
            lambda: None,
        ):
            yield "ConnectionRefusedError" if request.param == "stopped" else "no answer within 1 s"


async def test_a_router_that_does_not_answer_is_named_and_the_rest_is_shown(
    pair: tuple[Router, Router], missing: str
) -> None:
    first, _ = pair
    await first.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})

    async def is_told() -> bool:
        routers = {one["id"]: one for one in (await first.cluster())["routers"]}
        return "gone" in routers and missing in routers["gone"]["error"] and routers["router-b"]["ready"]

    await eventually(is_told)
    told = (await first.http.get("/requests/mine")).json()
    assert len(told["placements"]) == 1
    assert missing in told["missing"]["gone"]
    message = (await first.http.get("/requests/other")).json()["error"]["message"]
    assert "Router gone did not answer" in message
    assert missing in message


KEYS = """
- key: operator
  admin: true
  min_priority: -100
- key: user
- key: patient
  min_priority: 5
"""


class TestKeyFile:
    @pytest.fixture
    async def routers(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Path
    ) -> tuple[Router, Router]:
        (tmp_path / "keys.yaml").write_text(KEYS)
        worker = await start_worker(says("the fox"))
        return await _start_pair(start_router, worker, api_key=["plain"], api_key_file=tmp_path / "keys.yaml")

    async def test_limits_access_to_the_cluster(self, routers: tuple[Router, Router]) -> None:
        admin_key = ClusterSecret(SECRET).admin_key
        for key, allowed in (("operator", True), ("plain", True), (admin_key, True), ("user", False)):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/metrics", "/metrics/targets", "/cluster"):
                response = await routers[0].http.get(path, headers=headers)
                assert response.status_code == (200 if allowed else 403), (key, path)
                if not allowed:
                    assert response.json()["error"]["code"] == "admin_only"
            assert (await routers[0].http.get("/v1/models", headers=headers)).status_code == 200

    async def test_limits_the_priorities_of_requests(self, routers: tuple[Router, Router]) -> None:
        for key, priority, status in (
            ("operator", -100, 200),
            ("plain", -100, 200),
            ("user", 0, 200),
            ("user", -1, 403),
            ("patient", 5, 200),
            ("patient", 0, 403),
        ):
            headers = {"authorization": f"Bearer {key}"}
            chat = {"model": "small-model", "messages": [{"role": "user", "content": "Hi"}], "priority": priority}
            for path, body in (
                ("/v1/completions", TEXT | {"priority": priority}),
                ("/v1/chat/completions", chat),
            ):
                response = await routers[0].http.post(path, json=body, headers=headers)
                assert response.status_code == status, (key, priority)
                if status == 403:
                    error = response.json()["error"]
                    assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
        anything = await routers[0].http.post("/v1/completions", json=TEXT, headers={"authorization": "Bearer patient"})
        assert anything.status_code == 200

    async def test_a_tenant_finds_its_request_at_another_router(self, routers: tuple[Router, Router]) -> None:
        user, other = {"authorization": "Bearer user"}, {"authorization": "Bearer patient"}
        await routers[1].http.post("/v1/completions", json=TEXT, headers=user | {"x-request-id": "mine"})
        assert (await routers[0].http.get("/requests/mine", headers=user)).status_code == 200
        assert (await routers[0].http.get("/requests/mine", headers=other)).status_code == 404


async def test_a_router_that_is_not_ready_leaves_the_port_to_one_that_is(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    worker = await start_worker(says("the fox"))
    first = await start_router(worker)
    worker.snapshot_may_go.clear()
    port = int(first.url.rpartition(":")[2])
    second = await start_router(name="router-b", port=port)

    admins: dict[str, str] = {}

    async def served_by() -> set[str]:
        """Returns the routers that answer on ten new connections."""
        names = set()
        for _ in range(10):
            async with httpx.AsyncClient(base_url=second.url, timeout=30) as client:
                response = await client.post("/v1/completions", json=TEXT)
                assert response.status_code == 200, response.text
                told = await client.get(f"/requests/{response.headers['x-request-id']}")
                names |= {one["router"] for one in told.json()["placements"]}
        return names

    async def listed() -> bool:
        admins.update({one["id"]: one["admin"] for one in (await first.cluster())["routers"]})
        return "router-b" in admins

    await eventually(listed)
    async with httpx.AsyncClient(base_url=f"http://{admins['router-b']}", timeout=30) as admin:
        assert (await admin.get("/readyz")).status_code == 503
        assert await served_by() == {"router-a"}
        worker.snapshot_may_go.set()

        async def both_serve() -> bool:
            return await served_by() == {"router-a", "router-b"}

        await eventually(both_serve)
        assert (await admin.get("/readyz")).status_code == 200


async def test_usage_is_the_sum_over_all_routers(pair: tuple[Router, Router]) -> None:
    for router, requests in zip(pair, (1, 2), strict=True):
        for _ in range(requests):
            used = (await router.http.post("/v1/completions", json=TEXT)).json()["usage"]
    for router in pair:
        usage = (await router.http.get("/usage")).json()
        assert usage["missing"] == {}
        assert sorted(usage["since"]) == ["router-a", "router-b"]
        assert usage["tenants"] == {
            "": {
                "requests": 3,
                "prompt_tokens": 3 * used["prompt_tokens"],
                "cached_tokens": 0,
                "completion_tokens": 3 * used["completion_tokens"],
            }
        }

"""What routers count and show for the planner, and what they show of its plan."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from deploy.planner import ClusterPlanner
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.secret import SECRET

MODEL = "small-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}], "n": 2}
ADMIN = {"authorization": f"Bearer {ClusterSecret(SECRET).admin_key}"}


async def _load(router: Router) -> httpx.Response:
    own = await router.own_lease()
    async with httpx.AsyncClient(base_url=f"http://{own['admin']}", timeout=30) as admin:
        assert (await admin.get("/load")).status_code == 401
        return await admin.get("/load", headers=ADMIN)


async def test_a_router_counts_requests_and_answers(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    worker = await start_worker(says("one", "two"), hello={"current_role": pb.ROLE_COMBINED, "max_num_seqs": 8})
    older = await start_worker(says("one", "two"), worker_id="older")
    router = await start_router(worker, older, slo_ttft=1234.0)
    assert (await router.http.get("/load")).status_code == 404, "only on the admin port"
    before = (await _load(router)).json()
    for _ in range(3):
        assert (await router.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    view = (await _load(router)).json()
    (counted,) = view["arrivals"]
    assert (counted["requests"], counted["answers"]) == (3, 3)
    assert counted["prompt_tokens"] == 3 * _prompt_tokens(worker.submits or older.submits)
    assert counted["output_tokens"] > 3 * 2
    assert view["began"] == before["began"]
    assert view["slo_ttft"] == 1234.0
    assert [one["id"] for one in view["workers"]] == [worker.id], "an older worker can't change its role"
    assert view["performance"][0]["max_num_seqs"] == 8


def _prompt_tokens(submits: list[pb.Submit]) -> int:
    return submits[0].prompt_len


async def test_a_planner_plans_by_what_routers_count_and_they_show_its_plan(
    start_router: StartRouter, start_worker: StartWorker, says: Says, redis_url: str, cluster: str
) -> None:
    worker = await start_worker(says("one", "two"), hello={"current_role": pb.ROLE_COMBINED})
    router = await start_router(worker)
    assert ((await router.cluster())["planner"], (await router.cluster())["plan"]) == (False, None)
    said: list[str] = []
    ended = threading.Event()
    planner = ClusterPlanner("advise", redis_url, cluster, ClusterSecret(SECRET), threading.Lock(), said.append)
    planning = asyncio.create_task(planner.run(ended))

    async def is_shown() -> bool:
        return bool((await router.cluster())["plan"])

    async def is_measured() -> bool:
        return bool((await router.cluster())["plan"]["demands"])

    try:
        await eventually(is_shown)
        assert (await router.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await eventually(is_measured)
    finally:
        ended.set()
        await planning
    plan = (await router.cluster())["plan"]
    assert (plan["workers"], plan["current"], plan["prefill_workers"]) == (1, 0, 0)
    assert plan["reason"] == "too few requests to plan by: 1 so far, 1 of them recent"
    (demand,) = plan["demands"]
    assert demand["prompt_tokens"] == pytest.approx(_prompt_tokens(worker.submits))
    assert said in ([], ["The planner waits: no worker is ready", "The planner plans again"])

    async def is_away() -> bool:
        return not (await router.cluster())["planner"]

    await eventually(is_away)

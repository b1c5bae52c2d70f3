"""Two routers share one port; one is killed under load and starts again."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from models import tiny
from tests.e2e.client import MODEL, TIMEOUT_S, client, complete
from tests.e2e.cluster import ADMIN_KEY, START_S, Cluster

pytestmark = pytest.mark.e2e

AT_ONCE = 6
CACHED = list(range(100, 420))
"""A prompt of 20 blocks, which every worker has cached."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings: dict[str, Any] = {"simulate": "h200-qwen3-8b", "prefill": 1, "combined": 3, "routers": 2}
    with Cluster(model=str(tiny.CHECKPOINT), served_model_name=MODEL, kv_memory="1GiB", **settings) as running:
        yield running


class Load:
    """Outcomes of the requests, by request id."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.failed: dict[str, Exception] = {}


@asynccontextmanager
async def load(url: str) -> AsyncIterator[Load]:
    """Sends AT_ONCE requests at a time, each on a new connection, while the context is open."""
    outcomes, numbers, over = Load(), itertools.count(), asyncio.Event()
    ids = uuid.uuid4().hex

    async def ask(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            number = next(numbers)
            request_id = f"{ids}-{number}"
            http_headers = {"x-request-id": request_id}
            try:
                await complete(http, [*CACHED, number], stream=number % 2 == 1, max_tokens=20, headers=http_headers)
            except (httpx.HTTPError, AssertionError) as error:
                outcomes.failed[request_id] = error
            else:
                outcomes.answered.append(request_id)

    async with client(url) as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask(http))
        try:
            yield outcomes
        finally:
            over.set()


async def _more(outcomes: Load, count: int) -> None:
    """Waits until `count` more requests have been answered."""
    enough = len(outcomes.answered) + count
    async with asyncio.timeout(START_S):
        while len(outcomes.answered) < enough:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_a_router_that_dies_and_restarts_fails_only_its_own_requests(cluster: Cluster) -> None:
    admin = await _admin_ports(cluster)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with load(cluster.url) as outcomes, httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S) as operator:
        await _more(outcomes, 40)
        before = _cached_blocks((await operator.get(f"http://{admin['router-0']}/cluster")).json())
        await asyncio.to_thread(cluster.kill, "router-0")
        # The admin port opens before the router is ready; the index is complete once it is.
        at_ready = await _state_when_ready(operator, cluster, admin["router-0"])
        await _more(outcomes, 40)
        other = f"http://{admin['router-1']}"
        for request_id, error in outcomes.failed.items():
            assert isinstance(error, httpx.TransportError), error
            known = await operator.get(f"{other}/requests/{request_id}")
            assert known.status_code == 404, f"router-1 lost a request ({error!r}): {known.text}"
    assert len(outcomes.failed) <= AT_ONCE, "more requests failed than were in flight when the router died"
    assert [worker["state"] for worker in at_ready["workers"]] == ["ready"] * 4
    assert max(before.values()) >= len(CACHED) // 16
    for worker, blocks in _cached_blocks(at_ready).items():
        assert blocks >= before[worker]

    state = await asyncio.to_thread(cluster.wait_until_idle)
    assert [(router["ready"], router["error"]) for router in state["routers"]] == [(True, None)] * 2
    for worker in state["workers"]:
        views = list(worker["routers"].values())
        assert len(views) == 2
        for view in views:  # what each has learned by itself
            del view["ttft_factor"], view["overhead_ms"]
        assert views[0] == views[1]


def _cached_blocks(state: dict[str, Any]) -> dict[str, int]:
    return {worker["id"]: worker["cached_blocks"] for worker in state["workers"]}


async def _admin_ports(cluster: Cluster) -> dict[str, str]:
    """Admin addresses by router, once the routers have found each other."""
    async with asyncio.timeout(START_S):
        while True:
            routers = (await asyncio.to_thread(cluster.state))["routers"]
            if len(routers) == 2:
                return {router["id"]: router["admin"] for router in routers}
            await asyncio.sleep(0.01)


async def _state_when_ready(operator: httpx.AsyncClient, cluster: Cluster, old_admin: str) -> dict[str, Any]:
    """`/cluster` of the restarted router, as soon as it is ready."""
    async with asyncio.timeout(START_S):
        while True:
            routers = {one["id"]: one for one in (await asyncio.to_thread(cluster.state))["routers"]}
            admin = routers.get("router-0", {"admin": old_admin})["admin"]
            if admin != old_admin and (await operator.get(f"http://{admin}/readyz")).status_code == 200:
                answer: dict[str, Any] = (await operator.get(f"http://{admin}/cluster")).json()
                return answer
            await asyncio.sleep(0.01)

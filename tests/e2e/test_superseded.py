"""A second process with the id of a running one takes its place, and the first one does not come back."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cpd.common.process import EXIT_SUPERSEDED
from models import tiny
from tests.e2e.client import MODEL, client, complete
from tests.e2e.cluster import Cluster, eventually

pytestmark = pytest.mark.e2e

PROMPT = list(range(100, 200))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings: dict[str, Any] = {"simulate": "h200-qwen3-8b", "prefill": 0, "combined": 2, "routers": 1}
    with Cluster(model=str(tiny.CHECKPOINT), served_model_name=MODEL, kv_memory="1GiB", **settings) as running:
        yield running


async def test_streams_move_to_the_newer_workers(cluster: Cluster) -> None:
    async with client(cluster.url) as http, asyncio.TaskGroup() as group:
        streams = [group.create_task(complete(http, [*PROMPT, i], stream=True, max_tokens=600)) for i in range(4)]
        older = await asyncio.to_thread(cluster.supersede, "simulated")
        await asyncio.to_thread(eventually, lambda: older.state().exit_code is not None, "the older process ends")
        await asyncio.to_thread(cluster.wait_until_healthy)
    assert (older.state().exit_code, older.state().starts) == (EXIT_SUPERSEDED, 1)
    assert any("a newer process has the id combined-" in line for line in older.state().lines)
    assert [len(stream.result().token_ids) for stream in streams] == [600] * 4


async def test_a_newer_router_serves_the_same_port(cluster: Cluster) -> None:
    older = await asyncio.to_thread(cluster.supersede, "router-0")
    await asyncio.to_thread(eventually, lambda: older.state().exit_code is not None, "the older process ends")
    await asyncio.to_thread(cluster.wait_until_healthy)
    assert (older.state().exit_code, older.state().starts) == (EXIT_SUPERSEDED, 1)
    async with client(cluster.url) as http:
        assert len((await complete(http, PROMPT)).token_ids) == 16

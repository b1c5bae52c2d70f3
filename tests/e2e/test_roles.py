"""Roles change back and forth under load: no request fails, and every token is right."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cpd.common.errors import CPDError
from cpd.common.settings import Role
from deploy.role import change_role
from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, Answer, begin, client, complete
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

STREAMS, OUTPUT, LASTING = 16, 200, 1200
"""Streams, tokens of each, and of those that must still run when a role changes."""
LONG = 64


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest.fixture
def cluster(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path))
    settings = {"prefill": 1, "combined": 2, "routers": 1, "kv_checksum": True, "long_prefill_tokens": LONG}
    with (
        Cluster(model=str(checkpoint("qwen3")), served_model_name=MODEL, policy="round-robin", **settings) as running,
        running.known(),
    ):
        yield running


async def _become(cluster: Cluster, name: str, role: Role) -> None:
    await asyncio.to_thread(change_role, "default", name, role)

    def is_known() -> bool:
        return any((one["id"], one["role"]) == (name, role) for one in cluster.state()["workers"])

    await asyncio.to_thread(eventually, is_known, f"{name} is a {role} worker")


def _moved(cluster: Cluster) -> float:
    """How many streams have had their first token elsewhere."""
    found = re.search(r'cpd_moves_total\{outcome="moved"\} (\S+)', httpx.get(f"{cluster.url}/metrics").text)
    return float(found[1]) if found else 0.0


async def test_roles_change_under_streams_whose_tokens_are_all_right(cluster: Cluster, oracle: Oracle) -> None:
    prompts = oracle.prompts([30, 100, 200, 40] * (STREAMS // 4), seed=11)
    more = oracle.prompts([30] * 4 + [200] * 4, seed=12)
    asked: list[tuple[list[int], Answer]] = []
    async with client(cluster.url) as http:
        streams = [(prompt, await begin(http, prompt, max_tokens=OUTPUT)) for prompt in prompts]
        for turn in range(2):
            # the prefill worker answers
            await _become(cluster, "prefill-0", "combined")
            workers = set()
            for index in range(3):
                answer = await complete(http, more[index])
                asked.append((more[index], answer))
                workers.add(answer.worker)
            assert "prefill-0" in workers
            # a combined one computes for others, and its streams move
            before = _moved(cluster)
            streams += [(prompt, await begin(http, prompt, max_tokens=LASTING)) for prompt in more[:3]]
            await _become(cluster, "combined-0", "prefill")

            def have_moved(before: float = before) -> bool:
                (view,) = (one["routers"] for one in cluster.state()["workers"] if one["id"] == "combined-0")
                return all(router["sequences"] == 0 for router in view.values()) and _moved(cluster) > before

            await asyncio.to_thread(eventually, have_moved, "its streams have moved")
            answer = await complete(http, more[4 + turn])
            asked.append((more[4 + turn], answer))
            assert answer.route == "remote"
            # and back
            await _become(cluster, "combined-0", "combined")
            await _become(cluster, "prefill-0", "prefill")
        asked += [(prompt, await stream) for prompt, stream in streams]
    for prompt, answer in asked:
        oracle.check(prompt, answer.token_ids)
    assert {len(answer.token_ids) for _, answer in asked} == {16, OUTPUT, LASTING}
    await asyncio.to_thread(cluster.wait_until_idle)


async def test_the_last_combined_worker_stays_one(cluster: Cluster) -> None:
    await _become(cluster, "combined-0", "prefill")
    with pytest.raises(CPDError, match="last combined worker"):
        await asyncio.to_thread(change_role, "default", "combined-1", "prefill")
    with pytest.raises(CPDError, match="no worker 'combined-7' runs"):
        await asyncio.to_thread(change_role, "default", "combined-7", "prefill")
    await _become(cluster, "combined-0", "combined")


async def test_prefill_workers_answer_when_the_combined_ones_are_lost(cluster: Cluster, oracle: Oracle) -> None:
    prompts = oracle.prompts([40, 150], seed=13)
    async with client(cluster.url) as http:
        streams = [(prompt, await begin(http, prompt, max_tokens=OUTPUT)) for prompt in prompts]
        for name in ("combined-0", "combined-1"):
            await asyncio.to_thread(cluster.kill, name)
        for prompt, stream in streams:
            oracle.check(prompt, (await stream).token_ids)
    await asyncio.to_thread(cluster.wait_until_healthy)
    await asyncio.to_thread(cluster.wait_until_idle)

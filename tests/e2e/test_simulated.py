"""A cluster of simulated workers: the whole control plane, without a model."""

import asyncio
import random

import pytest

from models import tiny
from tests.e2e.client import MODEL, Answer, client, complete, complete_all
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

LONG = 64
PROMPTS = [[random.Random(seed).randrange(5, 2000) for _ in range(length)] for seed, length in enumerate([5, 40, 300])]


def test_a_simulated_cluster_answers_routes_and_recovers() -> None:
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        simulate="instant",
        prefill=2,
        combined=4,
        long_prefill_tokens=LONG,
    ) as cluster:
        workers = cluster.state()["workers"]
        assert len(workers) == 6
        assert {worker["pid"] for worker in workers} == {cluster.pid("simulated")}
        assert {(worker["info"]["transport"], worker["info"]["dtype"]) for worker in workers} == {("simulated",) * 2}

        everything_local = cluster.add_router(long_prefill_tokens=100_000)
        remote = asyncio.run(ask(cluster.url))
        local = asyncio.run(ask(everything_local))
        assert [answer.route for answer in remote] == ["local", "local", "remote"]
        assert [answer.route for answer in local] == ["local"] * 3
        assert [answer.token_ids for answer in remote] == [answer.token_ids for answer in local]
        cluster.wait_until_idle()

        prompts = [[seed % 2000] * (10 + seed % 200) for seed in range(60)]
        before = asyncio.run(complete_all(cluster.url, prompts, at_once=16))
        cluster.kill("simulated")
        cluster.wait_until_whole()
        after = asyncio.run(complete_all(cluster.url, prompts, at_once=16))
        assert [answer.token_ids for answer in after] == [answer.token_ids for answer in before]
        cluster.wait_until_idle()


async def ask(url: str) -> list[Answer]:
    """One completion after the other, streamed ones, too."""
    async with client(url) as http:
        answers = [await complete(http, prompt) for prompt in PROMPTS]
        streamed = [await complete(http, prompt, stream=True) for prompt in PROMPTS]
    assert [answer.text for answer in streamed] == [answer.text for answer in answers]
    return answers

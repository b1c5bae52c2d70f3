"""A cluster of simulated workers: the complete control plane without a model."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from models import tiny
from tests.e2e.client import MODEL, Answer, client, complete, complete_all
from tests.e2e.cluster import START_S, Cluster

pytestmark = pytest.mark.e2e

LONG = 64
PROMPTS = [[random.Random(seed).randrange(5, 2000) for _ in range(length)] for seed, length in enumerate([5, 40, 300])]


def test_local_and_remote_prefill_give_the_same_answers() -> None:
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


def test_streams_continue_with_the_same_tokens_after_all_workers_die() -> None:
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        simulate="h200-qwen3-8b",
        prefill=1,
        combined=2,
        long_prefill_tokens=LONG,
        kv_memory="1GiB",
    ) as cluster:
        before = asyncio.run(ask(cluster.url, max_tokens=200))

        async def ask_and_kill() -> list[Answer]:
            asking = asyncio.create_task(ask(cluster.url, max_tokens=200))
            async with asyncio.timeout(START_S):
                while not await asyncio.to_thread(is_busy, cluster):  # noqa: ASYNC110 - polls another process
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.kill, "simulated")
            return await asking

        assert [answer.token_ids for answer in asyncio.run(ask_and_kill())] == [answer.token_ids for answer in before]
        cluster.wait_until_idle()


def test_an_idle_worker_fetches_the_cached_prefix_of_a_busy_one() -> None:
    shared = [random.Random(9).randrange(5, 2000) for _ in range(3200)]
    prompts = [shared + [5 + number] * 20 for number in range(40)]
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        simulate="h200-qwen3-8b",
        prefill=0,
        combined=2,
        kv_memory="4GiB",
    ) as cluster:
        (first,) = asyncio.run(complete_all(cluster.url, [shared], 1, max_tokens=1))
        answers = asyncio.run(complete_all(cluster.url, prompts, len(prompts), max_tokens=200))
        assert (first.cached_tokens, {answer.cached_tokens for answer in answers}) == (0, {3200})
        cluster.wait_until_idle()
        fetches = [worker["load"]["prefix_fetches"] for worker in cluster.state()["workers"]]
        assert sorted(fetches, key=str) == [{"completed": 1}, {"served": 1}]


def is_busy(cluster: Cluster) -> bool:
    """True if a worker reports running requests."""
    return any(worker["load"] and worker["load"]["running"] for worker in cluster.state()["workers"])


async def ask(url: str, **fields: Any) -> list[Answer]:
    """Requests all completions at once, then again streamed; returns the first ones."""
    async with client(url) as http:
        answers, streamed = [
            await asyncio.gather(*(complete(http, prompt, stream=stream, **fields) for prompt in PROMPTS))
            for stream in (False, True)
        ]
    assert [answer.text for answer in streamed] == [answer.text for answer in answers]
    return answers


def test_what_would_wait_too_long_is_refused_and_the_rest_is_served() -> None:
    def body(seed: int) -> dict[str, Any]:
        rng = random.Random(seed)
        return {"model": MODEL, "prompt": [rng.randrange(5, 2000) for _ in range(6000)], "max_tokens": 2}

    async def flood(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=START_S) as http:
            return await asyncio.gather(*(http.post("/v1/completions", json=body(seed)) for seed in range(60)))

    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        simulate="h200-qwen3-8b",
        prefill=0,
        combined=1,
        kv_memory="16GiB",
        max_wait_s=0.5,
    ) as cluster:
        responses = asyncio.run(flood(cluster.url))
        refused = [response for response in responses if response.status_code != 200]
        assert 0 < len(refused) < len(responses)
        assert {response.status_code for response in refused} == {503}
        assert {response.json()["error"]["code"] for response in refused} <= {"wait_too_long", "queue_full"}
        assert all(1 <= int(response.headers["retry-after"]) <= 10 for response in refused)
        cluster.wait_until_idle()
        assert httpx.post(f"{cluster.url}/v1/completions", json=body(99), timeout=START_S).status_code == 200

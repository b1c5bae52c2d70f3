"""Processes are killed under load: no request hangs, every answer is right, and nothing leaks."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, Answer, client, complete, complete_all
from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

LONG = 64
REQUESTS, AT_ONCE = 40, 8
LOAD_S = 250.0


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def cluster(checkpoint: MakeCheckpoint) -> Iterator[Cluster]:
    settings = {
        "routers": 2,
        "long_prefill_tokens": LONG,
        "token_budget": 64,
        "prefill_progress_s": 2,
        "kv_checksum": True,
    }
    with Cluster(model=str(checkpoint("qwen3")), served_model_name=MODEL, **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy_and_idle_afterwards(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_healthy()
    cluster.wait_until_idle()


@asynccontextmanager
async def load(url: str, prompts: list[list[int]]) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Sends requests, AT_ONCE at a time, half of them streamed; waits for all of them at the end."""
    slots = asyncio.Semaphore(AT_ONCE)
    async with client(url) as http, asyncio.timeout(LOAD_S):

        async def one(index: int) -> Answer:
            async with slots:
                return await complete(http, prompts[index], stream=index % 2 == 1, max_tokens=40)

        tasks = [asyncio.create_task(one(index)) for index in range(len(prompts))]
        yield tasks
        await asyncio.gather(*tasks, return_exceptions=True)


def make_prompts(oracle: Oracle, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return oracle.prompts([rng.choice([10, 60, 150, 300]) for _ in range(REQUESTS)], seed)


async def some_done(tasks: list[asyncio.Task[Answer]], count: int) -> None:
    """Waits until `count` more requests have ended."""
    before = sum(task.done() for task in tasks)
    while sum(task.done() for task in tasks) < min(before + count, len(tasks)):
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize("victim", ["prefill-0", "combined-0"])
async def test_every_request_is_answered_right_when_a_worker_dies(
    cluster: Cluster, oracle: Oracle, victim: str
) -> None:
    prompts = make_prompts(oracle, seed=len(victim))
    async with load(cluster.url, prompts) as tasks:
        await some_done(tasks, 6)
        await asyncio.to_thread(cluster.kill, victim)
    answered = 0
    for prompt, task in zip(prompts, tasks, strict=True):
        error = task.exception()
        if error:
            # Only a refusal is acceptable, and only while the single decode worker is down.
            assert isinstance(error, httpx.HTTPStatusError), error
            assert error.response.status_code == 503
            assert victim == "combined-0"
            continue
        answered += 1
        answer = task.result()
        assert len(answer.token_ids) == 40
        oracle.check(prompt, answer.token_ids)
    assert answered >= (REQUESTS if victim == "prefill-0" else AT_ONCE)


async def test_a_router_that_dies_fails_only_its_own_requests(cluster: Cluster, oracle: Oracle) -> None:
    prompts = make_prompts(oracle, seed=3)
    async with load(cluster.url, prompts) as tasks:
        await some_done(tasks, 6)
        await asyncio.to_thread(cluster.kill, "router-0")
    answered = 0
    for prompt, task in zip(prompts, tasks, strict=True):
        error = task.exception()
        if error:
            assert isinstance(error, httpx.TransportError), error
            continue
        answered += 1
        oracle.check(prompt, task.result().token_ids)
    assert answered >= REQUESTS - AT_ONCE - 6


async def test_requests_are_served_while_redis_is_down(cluster: Cluster, oracle: Oracle) -> None:
    cluster.redis.stop()
    try:
        prompts = oracle.prompts([30, 100], seed=4)
        for prompt, answer in zip(prompts, await complete_all(cluster.url, prompts, at_once=2), strict=True):
            oracle.check(prompt, answer.token_ids)
    finally:
        cluster.redis.start()


async def test_requests_avoid_a_prefill_worker_that_hangs(cluster: Cluster, oracle: Oracle) -> None:
    [prompt] = oracle.prompts([60 + LONG], seed=5)
    cluster.send("prefill-0", signal.SIGSTOP)
    try:
        async with client(cluster.url) as http:
            answer = await complete(http, prompt)
    finally:
        cluster.send("prefill-0", signal.SIGCONT)
    oracle.check(prompt, answer.token_ids)


async def test_nothing_leaks_when_clients_hang_up(cluster: Cluster, oracle: Oracle) -> None:
    rng = random.Random(6)
    prompts = make_prompts(oracle, seed=6) * 3
    async with client(cluster.url) as http, asyncio.timeout(LOAD_S):
        slots = asyncio.Semaphore(2 * AT_ONCE)

        async def one(index: int) -> None:
            async with slots:
                request = complete(http, prompts[index], stream=index % 2 == 1, max_tokens=30)
                if index % 3:
                    oracle.check(prompts[index], (await request).token_ids)
                    return
                try:
                    async with asyncio.timeout(rng.random() * 0.5):
                        await request
                except TimeoutError:
                    pass

        await asyncio.gather(*(one(index) for index in range(len(prompts))))
    state = await asyncio.to_thread(cluster.wait_until_idle)
    assert all(worker["load"]["pages"]["used"] == 0 for worker in state["workers"])

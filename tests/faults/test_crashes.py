"""A request during which two workers crash, with real processes."""

import asyncio
import random

import httpx
import pytest

from tests.conftest import MakeCheckpoint
from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.matrix import DEADLINE_S, MAX_TOKENS
from tests.faults.points import Action, Point

pytestmark = [pytest.mark.e2e, pytest.mark.faults]


async def test_a_request_that_crashes_both_its_workers_is_refused_from_then_on(checkpoint: MakeCheckpoint) -> None:
    oracle = Oracle(checkpoint("qwen3"))
    prompt, other_prompt = oracle.prompts([20, 20], random.randrange(1 << 30))
    async with FaultCluster(checkpoint("qwen3")) as cluster, client(cluster.urls["router-0"]) as http:
        combined = [worker for worker in cluster.workers if worker.startswith("combined")]
        try:
            for worker in combined:
                await cluster.arm(worker, Point.STEP, Action.HOLD)
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
                request = group.create_task(_error(http, prompt))
                for worker in combined:
                    group.create_task(_kill_when_held(cluster, worker))
            await cluster.wait_until_healthy()
            retried = await _error(http, prompt)
            answer = await complete(http, other_prompt, max_tokens=MAX_TOKENS)
            await cluster.wait_until_idle()
        except BaseException:
            cluster.print_logs()
            raise
    for error in (request.result(), retried):
        assert error.startswith("500")
        assert "request_crashes_workers" in error
    oracle.check(other_prompt, answer.token_ids)


async def _kill_when_held(cluster: FaultCluster, worker: str) -> None:
    while not await cluster.triggered(worker):  # noqa: ASYNC110 - polls another process
        await asyncio.sleep(0.05)
    cluster.processes[worker].kill()


async def _error(http: httpx.AsyncClient, prompt: list[int]) -> str:
    """Sends a request that must fail, and returns its error."""
    with pytest.raises(httpx.HTTPStatusError) as failed:
        await complete(http, prompt, max_tokens=MAX_TOKENS)
    return str(failed.value)

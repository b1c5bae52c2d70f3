"""A client hangs up, at each stage of its request: its pages are free once the step or transfer in progress has ended.

A cell holds requests in the stage, hangs up, lets the worker go on, and measures how long it takes until every page is
free or cached. A request that waits in the router has no pages (tests/router/dispatch/test_dispatcher.py).
"""

import asyncio
import random
import time
from enum import Enum

from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.matrix import DEADLINE_S, MAX_TOKENS, PROMPT_TOKENS, Phase, hold, retrieve_error
from tests.faults.move_matrix import MovePhase, hold_move
from tests.faults.points import Action, Point

_HELD_PER_WORKER = 3
_SHORT_PROMPT_TOKENS = 20


class Waiting(Enum):
    """Where requests wait behind others, whose step is held."""

    IN_WORKER = "in_worker"
    AT_PREFILL_WORKER = "at_prefill_worker"


async def run_hang_up_cell(cluster: FaultCluster, oracle: Oracle, stage: Phase | Waiting | MovePhase) -> float:
    """Runs one cell.

    Returns:
        Seconds until a router knew that every page was free or cached. Its reports come every 0.1 s.

    Raises:
        AssertionError: Pages stayed.
    """
    await cluster.disarm()
    ended: tuple[str, ...] = ()
    async with client(cluster.urls["router-0"]) as http:
        match stage:
            case Phase():
                (prompt,) = oracle.prompts([PROMPT_TOKENS], random.randrange(1 << 30))
                request, _ = await hold(cluster, http, prompt, stage)
                requests = [request]
            case MovePhase():
                _, request, source, _ = await hold_move(cluster, oracle, http, stage)
                requests, ended = [request], (source,)
            case Waiting():
                role = "prefill" if stage is Waiting.AT_PREFILL_WORKER else "combined"
                tokens = PROMPT_TOKENS if stage is Waiting.AT_PREFILL_WORKER else _SHORT_PROMPT_TOKENS
                workers = [worker for worker in cluster.workers if worker.startswith(role)]
                for worker in workers:
                    await cluster.arm(worker, Point.STEP, Action.HOLD)
                prompts = oracle.prompts([tokens] * _HELD_PER_WORKER * len(workers), random.randrange(1 << 30))
                requests = []
                for prompt in prompts:
                    requests.append(asyncio.create_task(complete(http, prompt, stream=True, max_tokens=MAX_TOKENS)))
                    requests[-1].add_done_callback(retrieve_error)
                async with asyncio.timeout(DEADLINE_S):
                    while not await _all_wait(cluster, workers, len(prompts)):  # noqa: ASYNC110 - polls other processes
                        await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
    await cluster.disarm()
    began = time.monotonic()
    await cluster.wait_until_idle(ended=ended)
    took_s = time.monotonic() - began
    await cluster.wait_until_healthy()
    return took_s


async def _all_wait(cluster: FaultCluster, workers: list[str], requests: int) -> bool:
    """True if the router has placed all requests, and each of these workers is held in a step."""
    views = [worker["routers"]["router-0"] for worker in (await cluster.state("router-0")).get("workers", [])]
    held = [await cluster.triggered(worker) for worker in workers]
    return all(held) and sum(view["sequences"] for view in views) == requests

"""Each fault, to either worker of a prefix fetch, in each phase of the fetch.

A combined worker fetches a prefix from the cache of another one. The test talks to both workers without a router, so
that it decides who fetches from whom. A cell holds a request in a phase of its fetch, injects the fault, and lets the
request go on. Its tokens must be right, wherever the prefix comes from, and nothing may leak.
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum

from cpd.common.blocks import BLOCK_SIZE, extend_hashes, hash_root
from cpd.rpc import cpd_pb2 as pb
from engine.types import Request, SamplingParams
from tests.e2e.oracle import Oracle
from tests.faults.cluster import TELL_S, TOKEN, FaultCluster
from tests.faults.matrix import DEADLINE_S, MAX_TOKENS, PROMPT_TOKENS, Fault, Handlers, Subject, inject
from tests.faults.points import Action, Point
from tests.waiting import eventually
from tests.worker.client import Answer, Client

SOURCE, FETCHER = "combined-0", "combined-1"


class Side(Enum):
    """The worker that the fault hits: the one that has the prefix, or the one that fetches it."""

    SOURCE = "source"
    FETCHER = "fetcher"


class FetchPhase(Enum):
    """How far the fetch has come when the fault happens."""

    BEFORE_PINNED = "before_pinned"
    DURING_PUSH = "during_push"
    AFTER_LAST_PAGE = "after_last_page"


_HOLD_AT = {
    FetchPhase.BEFORE_PINNED: (SOURCE, Point.CONNECT, 0),
    FetchPhase.DURING_PUSH: (SOURCE, Point.PAGE, 10),
    FetchPhase.AFTER_LAST_PAGE: (FETCHER, Point.LANDED, 0),
}


@dataclass(frozen=True)
class _Address:
    id: str
    address: str
    session: str


async def run_fetch_cell(cluster: FaultCluster, oracle: Oracle, side: Side, fault: Fault, phase: FetchPhase) -> None:
    """Runs one cell.

    Raises:
        AssertionError: A token was wrong, the request hung, or something leaked.
    """
    await cluster.disarm()
    workers = {
        one["id"]: _Address(one["id"], one["address"], one["session"]) for one in (await cluster.state())["workers"]
    }
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(Client(workers[SOURCE], token=TOKEN))
        fetcher = await stack.enter_async_context(Client(workers[FETCHER], token=TOKEN))
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while (held := await _hold(cluster, oracle, source, fetcher, phase, number)) is None:
                number += 1
        prompt, answer = held
        handlers = Handlers(prefill=SOURCE, decode=FETCHER)
        end_fault = await inject(cluster, Subject.PREFILL if side is Side.SOURCE else Subject.DECODE, fault, handlers)
        try:
            await cluster.disarm(patience_s=1.0 if fault is Fault.STOPPED else TELL_S)
            if side is Side.SOURCE:
                await eventually(lambda: answer.done, DEADLINE_S)
        finally:
            await end_fault()
        await cluster.disarm()
        if side is Side.SOURCE or fault is Fault.SLOW:
            await eventually(lambda: answer.done, DEADLINE_S)
            assert len(answer.tokens[0]) == MAX_TOKENS
            oracle.check(prompt, answer.tokens[0])
    await cluster.wait_until_healthy()
    await cluster.wait_until_idle()


async def _hold(
    cluster: FaultCluster, oracle: Oracle, source: Client, fetcher: Client, phase: FetchPhase, number: int
) -> tuple[list[int], Answer] | None:
    """Sends a request whose fetch is held in the phase; returns its prompt and its answer.

    Returns None if the request ended without a fetch, because the workers were not connected yet.
    """
    (prompt,) = oracle.prompts([PROMPT_TOKENS], random.randrange(1 << 30))
    await source.done(await source.submit(_request(prompt, 1), number))
    worker, point, k = _HOLD_AT[phase]
    await cluster.arm(worker, point, Action.HOLD, k)
    hint = pb.PrefixSource(worker_id=SOURCE, address=source.session, blocks=PROMPT_TOKENS // BLOCK_SIZE)
    answer = await fetcher.submit(_request(prompt, MAX_TOKENS), number, prefix_source=hint)
    while not await cluster.triggered(worker):
        if answer.done:
            return None
    return prompt, answer


def _request(prompt: list[int], max_tokens: int) -> Request:
    root = hash_root(b"fetches")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request("fetch", prompt, len(prompt), params, root, extend_hashes(root, prompt))

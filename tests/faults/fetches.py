"""Every fault to either side of a fetch, a prefix that one combined worker has from another one's cache.

The two are asked directly, so that it is certain who fetches from whom. A request is held in a phase of its fetch, the
fault happens, the request goes on: its tokens are right, wherever they come from, and nothing is left of the fetch.
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
from tests.faults.cluster import TOKEN, FaultCluster
from tests.faults.matrix import DEADLINE_S, MAX_TOKENS, PROMPT_TOKENS, Fault, Subject, Victims, begin, release
from tests.faults.points import Action, Point
from tests.waiting import eventually
from tests.worker.client import Answer, Client

SOURCE, HERE = "combined-0", "combined-1"


class Side(Enum):
    """To whom it happens: who has the prefix, or who fetches it."""

    SOURCE = "source"
    HERE = "here"


class FetchPhase(Enum):
    """Where the fetch is when it happens."""

    BEFORE_PINNED = "before_pinned"
    DURING_PUSH = "during_push"
    AFTER_LAST_PAGE = "after_last_page"


_HOLDS = {
    FetchPhase.BEFORE_PINNED: (SOURCE, Point.CONNECT, 0),
    FetchPhase.DURING_PUSH: (SOURCE, Point.PAGE, 10),
    FetchPhase.AFTER_LAST_PAGE: (HERE, Point.LANDED, 0),
}


@dataclass(frozen=True)
class _Address:
    address: str
    session: str


async def run_fetch_cell(cluster: FaultCluster, oracle: Oracle, side: Side, fault: Fault, phase: FetchPhase) -> None:
    """One cell.

    Raises:
        AssertionError: It did not end as it should.
    """
    await release(cluster)
    workers = {one["id"]: _Address(one["address"], one["session"]) for one in (await cluster.state())["workers"]}
    async with AsyncExitStack() as stack:
        source, here = [await stack.enter_async_context(Client(workers[name], token=TOKEN)) for name in (SOURCE, HERE)]
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while (held := await _held(cluster, oracle, source, here, phase, number)) is None:
                number += 1
        prompt, answer = held
        victims = Victims(prefill=SOURCE, decode=HERE)
        heal = await begin(cluster, Subject.PREFILL if side is Side.SOURCE else Subject.DECODE, fault, victims)
        try:
            await release(cluster)
            if side is Side.SOURCE:
                await eventually(lambda: answer.done, DEADLINE_S)
        finally:
            await heal()
        await release(cluster)
        if side is Side.SOURCE or fault is Fault.SLOW:
            await eventually(lambda: answer.done, DEADLINE_S)
            assert len(answer.tokens[0]) == MAX_TOKENS
            oracle.judge(prompt, answer.tokens[0])
    await cluster.whole()
    await cluster.idle()


async def _held(
    cluster: FaultCluster, oracle: Oracle, source: Client, here: Client, phase: FetchPhase, number: int
) -> tuple[list[int], Answer] | None:
    """A prompt, and what comes of it once its fetch is held in the phase; None: the workers were not connected yet."""
    (prompt,) = oracle.prompts([PROMPT_TOKENS], random.randrange(1 << 30))
    await source.done(await source.submit(_request(prompt, 1), number))
    worker, point, k = _HOLDS[phase]
    await cluster.order(worker, point, Action.HOLD, k)
    hint = pb.PrefixSource(worker_id=SOURCE, address=source.session, blocks=PROMPT_TOKENS // BLOCK_SIZE)
    answer = await here.submit(_request(prompt, MAX_TOKENS), number, prefix_source=hint)
    while not await cluster.reached(worker):
        if answer.done:
            return None
    return prompt, answer


def _request(prompt: list[int], max_tokens: int) -> Request:
    root = hash_root(b"fetches")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request("fetch", prompt, len(prompt), params, root, extend_hashes(root, prompt))

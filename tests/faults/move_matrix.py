"""Each fault, to each side of a stream that moves away from its worker, in each phase of the move.

A cell sends a request, drains the worker that decodes it or slows it down, and holds the fetch of its pages by the
other combined worker in the phase: the request is parked, and the target has not started. Then it injects the fault and
lets the move go on.
The tokens must be right, wherever they come from, and nothing may leak. A drained worker ends and is started again.
"""

import asyncio
import random
import signal
from enum import Enum

import httpx

from tests.e2e.client import Answer, begin, client
from tests.e2e.oracle import Oracle
from tests.faults.cluster import TELL_S, FaultCluster
from tests.faults.matrix import DEADLINE_S, PROMPT_TOKENS, Fault, Handlers, Subject, inject, retrieve_error
from tests.faults.points import Action, Point

COMBINED = ("combined-0", "combined-1")
OUTPUT_TOKENS = 600
"""Enough to be running still when its worker drains."""


class Cause(Enum):
    """Why the stream moves: its worker drains, or has become slow."""

    DRAINS = "drains"
    SLOW = "slow"


class MoveSide(Enum):
    """The process that the fault hits: the worker that is left, the one that goes on, or the router of the request."""

    SOURCE = "source"
    TARGET = "target"
    ROUTER = "router"


class MovePhase(Enum):
    """How far the move has come when the fault happens."""

    PARKED = "parked"
    DURING_PUSH = "during_push"
    AFTER_LAST_PAGE = "after_last_page"


_HOLD_AT = {
    MovePhase.PARKED: (MoveSide.SOURCE, Point.CONNECT, 0),
    MovePhase.DURING_PUSH: (MoveSide.SOURCE, Point.PAGE, 10),
    MovePhase.AFTER_LAST_PAGE: (MoveSide.TARGET, Point.LANDED, 0),
}


async def run_move_cell(
    cluster: FaultCluster,
    oracle: Oracle,
    side: MoveSide,
    fault: Fault,
    phase: MovePhase,
    cause: Cause = Cause.DRAINS,
) -> str:
    """Runs one cell.

    Returns:
        `right` if the request was answered with the right tokens, otherwise its error.

    Raises:
        AssertionError: A token was wrong, the request hung, or something leaked.
    """
    await cluster.disarm()
    async with client(cluster.urls["router-0"]) as http:
        prompt, request, source, target = await hold_move(cluster, oracle, http, phase, cause)
        hit = Subject.ROUTER if side is MoveSide.ROUTER else Subject.DECODE
        handlers = Handlers(prefill="prefill-0", decode=target if side is MoveSide.TARGET else source)
        end_fault = await inject(cluster, hit, fault, handlers)
        try:
            await cluster.disarm(patience_s=1.0 if fault is Fault.STOPPED else TELL_S)
            if side is not MoveSide.ROUTER:
                await asyncio.wait([request], timeout=DEADLINE_S)
        finally:
            await end_fault()
        await cluster.disarm()
        await asyncio.wait([request], timeout=DEADLINE_S)
        assert request.done(), f"the request has not ended within {DEADLINE_S:g} s of the end of the fault"
        outcome = _check(oracle, prompt, request)
        await cluster.wait_until_healthy()
    await cluster.wait_until_idle()
    return outcome


async def hold_move(
    cluster: FaultCluster,
    oracle: Oracle,
    http: httpx.AsyncClient,
    phase: MovePhase,
    cause: Cause = Cause.DRAINS,
) -> tuple[list[int], asyncio.Task[Answer], str, str]:
    """Returns prompt, request, source and target when the request is held in the phase."""
    while (held := await _try_to_hold(cluster, oracle, http, phase, cause)) is None:
        await cluster.disarm()
        await cluster.wait_until_healthy()
    return held


async def _try_to_hold(
    cluster: FaultCluster, oracle: Oracle, http: httpx.AsyncClient, phase: MovePhase, cause: Cause
) -> tuple[list[int], asyncio.Task[Answer], str, str] | None:
    """Sends a request, and has it leave its worker. Returns what `hold_move` does when it is held in the phase.

    Returns None if the request ended without being held: before its worker reported it, or because the workers' pools
    were connected already.
    """
    (prompt,) = oracle.prompts([PROMPT_TOKENS], random.randrange(1 << 30))
    request = await begin(http, prompt, max_tokens=OUTPUT_TOKENS)
    request.add_done_callback(retrieve_error)
    while not (busy := await cluster.busy_workers("combined")):
        if request.done():
            request.result()
            return None
    (source,) = busy
    (target,) = set(COMBINED) - {source}
    side, point, k = _HOLD_AT[phase]
    holds = source if side is MoveSide.SOURCE else target
    await cluster.arm(holds, point, Action.HOLD, k)
    process = cluster.processes[source]
    if cause is Cause.DRAINS:
        process.signal(signal.SIGTERM)
    else:
        process.throttle()
    try:
        while not await _triggered(cluster, holds):
            if request.done():
                request.result()
                return None
    finally:
        process.unthrottle()
    return prompt, request, source, target


async def _triggered(cluster: FaultCluster, worker: str) -> bool:
    try:
        return await cluster.triggered(worker)
    except OSError:  # its drain is complete
        await asyncio.sleep(0.05)
        return False


def _check(oracle: Oracle, prompt: list[int], request: asyncio.Task[Answer]) -> str:
    error = request.exception()
    if error is not None:
        assert isinstance(error, httpx.HTTPStatusError | httpx.TransportError), error
        assert not isinstance(error, httpx.TimeoutException), error
        return f"{type(error).__name__}: {error}"
    answer = request.result()
    assert len(answer.token_ids) == OUTPUT_TOKENS
    oracle.check(prompt, answer.token_ids)
    return "right"

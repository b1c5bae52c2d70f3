"""Every fault to every subject in every phase of a request with a remote prefill.

A request is held in a phase, the fault happens, the request goes on. Meanwhile others are served. Then the fault is
healed, and nothing may be left of it.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import httpx

from tests.e2e.client import Answer, client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.points import Action, Point

DEADLINE_S = 45.0
"""A request has ended by then: noticing takes up to 8 s, and a lost request waits up to 30 s for a worker."""

PROMPT_TOKENS, MAX_TOKENS = 600, 24
OTHERS = (20, 300, 300)
"""Lengths of the others' prompts."""


class Subject(Enum):
    """To whom it happens: those that have the request."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    REDIS = "redis"
    NETWORK = "network"

    @property
    def is_process(self) -> bool:
        """Whether it is one process of the cluster, on a machine of its own."""
        return self in (Subject.PREFILL, Subject.DECODE, Subject.ROUTER)


class Fault(Enum):
    """What happens; until the request has ended, where it can end meanwhile.

    To the network: KILLED is no link at all for longer than sessions last, STOPPED for a moment, RESTARTED new links
    with the old addresses, CUT_OFF the two workers from each other, SLOW both workers' links.
    """

    KILLED = "killed"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    CUT_OFF = "cut_off"
    SLOW = "slow"


class Phase(Enum):
    """Where the request is when it happens."""

    BEFORE_RESERVE = "before_reserve"
    DURING_PREFILL = "during_prefill"
    DURING_PUSH = "during_push"
    AFTER_LAST_PAGE = "after_last_page"
    WHILE_DECODING = "while_decoding"


_HOLDS = {
    Phase.BEFORE_RESERVE: ("prefill", Point.CONNECT, 0),
    Phase.DURING_PREFILL: ("prefill", Point.STEP, 3),
    Phase.DURING_PUSH: ("prefill", Point.PAGE, 10),
    Phase.AFTER_LAST_PAGE: ("combined", Point.LANDED, 0),
    Phase.WHILE_DECODING: ("combined", Point.STEP, 6),
}

LONG_CUT_S, SHORT_CUT_S = 10.0, 2.0


@dataclass(frozen=True)
class Victims:
    """Who has the request, by name."""

    prefill: str
    decode: str
    router: str = "router-0"


async def run_cell(cluster: FaultCluster, oracle: Oracle, subject: Subject, fault: Fault, phase: Phase) -> str:
    """One cell of the matrix.

    Returns:
        How the request ended: `right`, or the error.

    Raises:
        AssertionError: Not as it should.
    """
    seed = random.randrange(1 << 30)  # a prompt that was here before is cached, and takes another route
    await release(cluster)
    prompt, *others = oracle.prompts([PROMPT_TOKENS, *OTHERS], seed)
    async with client(cluster.urls["router-0"]) as http, client(cluster.urls["router-1"]) as other_http:
        request, victims = await _held(cluster, http, prompt, phase)
        heal = await begin(cluster, subject, fault, victims)
        try:
            await release(cluster)
            alone = subject is Subject.NETWORK and fault in (Fault.KILLED, Fault.STOPPED)
            if not alone:
                await _serve_others(oracle, other_http, others)
            if not alone and not (subject is Subject.ROUTER and fault in (Fault.STOPPED, Fault.CUT_OFF)):
                await asyncio.wait([request], timeout=DEADLINE_S)
                assert request.done(), f"the request has not ended within {DEADLINE_S:g} s"
        finally:
            await heal()
        await release(cluster)
        await asyncio.wait([request], timeout=DEADLINE_S)
        assert request.done(), f"the request has not ended within {DEADLINE_S:g} s of the end of the fault"
        ended = _judge(oracle, prompt, request)
        await cluster.whole()
        if alone:
            await _serve_others(oracle, other_http, others)
    await cluster.idle()
    return ended


async def release(cluster: FaultCluster) -> None:
    """Takes all orders back. Those that can hear it go on; who can't is to be told again."""

    async def tell(worker: str) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(1):
                await cluster.release(worker)

    await asyncio.gather(*(tell(worker) for worker in cluster.workers))


async def _held(
    cluster: FaultCluster, http: httpx.AsyncClient, prompt: list[int], phase: Phase
) -> tuple[asyncio.Task[Answer], Victims]:
    """A request that is held in the phase, and who has it."""
    role, point, k = _HOLDS[phase]
    able = [worker for worker in cluster.workers if worker.startswith(role)]
    for worker in able:
        await cluster.order(worker, point, Action.HOLD, k)
    request = asyncio.create_task(complete(http, prompt, stream=True, max_tokens=MAX_TOKENS))
    request.add_done_callback(_see)
    async with asyncio.timeout(DEADLINE_S):
        while not (held := [worker for worker in able if await cluster.reached(worker)]):
            assert not request.done(), f"the request ended before it was held: {request}"
    prefill = [worker for worker in cluster.workers if worker.startswith("prefill") and await cluster.used(worker)]
    decode = held if role == "combined" else []
    async with asyncio.timeout(DEADLINE_S):
        while not decode:  # what it reports comes a moment later
            decode = await cluster.busy("combined")
    assert len(prefill) == len(decode) == 1, (prefill, decode)
    return request, Victims(prefill[0], decode[0])


def _see(request: asyncio.Task[Answer]) -> None:
    """Nobody logs its error where the cell fails before: in Python 3.11 that can break pytest's report (gh-106905)."""
    if not request.cancelled():
        request.exception()


Heal = Callable[[], Awaitable[None]]


async def begin(cluster: FaultCluster, subject: Subject, fault: Fault, victims: Victims) -> Heal:
    """Has the fault happen; returns what ends it."""
    match subject:
        case Subject.REDIS:
            return await _harm_redis(cluster, fault)
        case Subject.NETWORK:
            return await _harm_network(cluster, fault, victims)
    name = {Subject.PREFILL: victims.prefill, Subject.DECODE: victims.decode, Subject.ROUTER: victims.router}[subject]
    process = cluster.processes[name]
    match fault:
        case Fault.KILLED:
            process.kill()
            return _calling(process.start)
        case Fault.STOPPED:
            process.signal(signal.SIGSTOP)
            return _calling(lambda: process.signal(signal.SIGCONT))
        case Fault.RESTARTED:
            process.kill()
            process.start()
            return _calling()
        case Fault.CUT_OFF:
            assert cluster.network is not None
            network = cluster.network
            network.cut(name)
            return _calling(lambda: network.join(name))
        case Fault.SLOW:
            process.slow()
            return _calling(process.fast)


async def _harm_redis(cluster: FaultCluster, fault: Fault) -> Heal:
    redis, proxy = cluster.redis, cluster.proxy
    match fault:
        case Fault.KILLED | Fault.RESTARTED:
            os.kill(redis.pid, signal.SIGKILL)
            redis.stop()
            if fault is Fault.KILLED:
                return _calling(redis.start)
            redis.start()
            return _calling()
        case Fault.STOPPED:
            os.kill(redis.pid, signal.SIGSTOP)
            return _calling(lambda: os.kill(redis.pid, signal.SIGCONT))
        case Fault.CUT_OFF:
            proxy.flowing.clear()
            return _calling(proxy.flowing.set)
        case Fault.SLOW:
            proxy.slow = True
            return _calling(lambda: setattr(proxy, "slow", False))


async def _harm_network(cluster: FaultCluster, fault: Fault, victims: Victims) -> Heal:
    assert cluster.network is not None
    network, pair = cluster.network, (victims.prefill, victims.decode)
    machines = list(cluster.processes)
    match fault:
        case Fault.KILLED | Fault.STOPPED:
            for name in machines:
                network.cut(name)

            async def join() -> None:
                await asyncio.sleep(LONG_CUT_S if fault is Fault.KILLED else SHORT_CUT_S)
                for name in machines:
                    network.join(name)

            return join
        case Fault.RESTARTED:
            for name in machines:
                network.cut(name)
                network.join(name)
            return _calling()
        case Fault.CUT_OFF:
            network.part(*pair)
            return _calling(lambda: network.unite(*pair))
        case Fault.SLOW:
            for name in pair:
                network.slow(name)
            return _calling(*(lambda name=name: network.fast(name) for name in pair))


def _calling(*actions: Callable[[], object]) -> Heal:
    async def heal() -> None:
        for action in actions:
            action()

    return heal


async def _serve_others(oracle: Oracle, http: httpx.AsyncClient, prompts: list[list[int]]) -> None:
    """Requests of others, by the other router: all must be answered, and right."""
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(complete(http, prompt, max_tokens=MAX_TOKENS) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == MAX_TOKENS
        oracle.judge(prompt, answer.token_ids)


def _judge(oracle: Oracle, prompt: list[int], request: asyncio.Task[Answer]) -> str:
    """Right tokens, or an error that says what happened: in HTTP, in the stream, or by the connection's end."""
    error = request.exception()
    if error is None:
        answer = request.result()
        assert len(answer.token_ids) == MAX_TOKENS
        oracle.judge(prompt, answer.token_ids)
        return "right"
    assert isinstance(error, httpx.HTTPStatusError | httpx.TransportError), error
    assert not isinstance(error, httpx.TimeoutException), error
    if isinstance(error, httpx.HTTPStatusError):
        assert error.response.status_code in (502, 503), error
    return f"{type(error).__name__}: {error}"

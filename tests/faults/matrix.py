"""Each fault, to each part of the cluster, in each phase of a request with a remote prefill.

A cell of the matrix holds a request in the phase, injects the fault, and lets the request go on. Meanwhile the other
router serves other requests. Then the cell ends the fault and checks that every answer was right and nothing leaked.

To add a fault, add a value to `Fault` and say in `inject`, `_inject_into_redis` and `_inject_into_network` how it
begins and how it ends; mypy reports a missing case, and `pytest -m faults` runs it for each `Subject` in each `Phase`,
for each `Side` and `FetchPhase` of `fetch_matrix.py`, and for each `MoveSide` and `MovePhase` of `move_matrix.py`.
`displacement_matrix.py` has its own list of faults, `FAULTS`, for models that displace each other.

To add a phase, add a value to `Phase` and to `_HOLD_AT`, if necessary with a new injection point in `points.py`.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import httpx

from tests.e2e.client import Answer, client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import TELL_S, FaultCluster, Process
from tests.faults.points import Action, Point

DEADLINE_S = 45.0
"""Time for a request to end: a loss is noticed within 8 s, and a lost request waits up to 30 s for a worker."""

PROMPT_TOKENS, MAX_TOKENS = 600, 24
OTHER_PROMPT_TOKENS = (20, 300, 300)


class Subject(Enum):
    """The part of the cluster that the fault hits. Of the processes, it hits those that handle the request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH_WORKERS = "both_workers"  # as if they had a machine of their own
    ROUTER = "router"
    REDIS = "redis"
    NETWORK = "network"

    @property
    def is_process(self) -> bool:
        """True for processes with network namespaces of their own."""
        return self not in (Subject.REDIS, Subject.NETWORK)


class Fault(Enum):
    """What happens to the subject.

               processes or Redis                            the network
    KILLED     SIGKILL, started again after the request      all links cut for LONG_CUT_S
    STOPPED    SIGSTOP, SIGCONT later                        all links cut for SHORT_CUT_S
    RESTARTED  SIGKILL, at once again on the same address    all links cut and reconnected at once
    CUT_OFF    its link (Redis: its proxy) passes nothing    the prefill and the decode worker can't reach each other
    SLOW       runs a fifth of the time (Redis: late data)   the links of both workers are slow
    """

    KILLED = "killed"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    CUT_OFF = "cut_off"
    SLOW = "slow"


class Phase(Enum):
    """How far the request has come when the fault happens."""

    BEFORE_RESERVE = "before_reserve"
    DURING_PREFILL = "during_prefill"
    DURING_PUSH = "during_push"
    AFTER_LAST_PAGE = "after_last_page"
    WHILE_DECODING = "while_decoding"


_HOLD_AT = {
    Phase.BEFORE_RESERVE: ("prefill", Point.CONNECT, 0),
    Phase.DURING_PREFILL: ("prefill", Point.STEP, 3),
    Phase.DURING_PUSH: ("prefill", Point.PAGE, 10),
    Phase.AFTER_LAST_PAGE: ("combined", Point.LANDED, 0),
    Phase.WHILE_DECODING: ("combined", Point.STEP, 6),
}
"""Where the request is held in each phase: at an injection point of workers of this role, reached for the k-th time."""

LONG_CUT_S, SHORT_CUT_S = 10.0, 2.0
"""Longer than sessions survive, and shorter."""


@dataclass(frozen=True)
class Handlers:
    """The processes that handle the held request, by name."""

    prefill: str
    decode: str
    router: str = "router-0"


async def run_cell(cluster: FaultCluster, oracle: Oracle, subject: Subject, fault: Fault, phase: Phase) -> str:
    """Runs one cell of the matrix.

    Returns:
        `right` if the request was answered with the right tokens, otherwise its error.

    Raises:
        AssertionError: A token was wrong, a request hung or failed in another way, or something leaked.
    """
    seed = random.randrange(1 << 30)  # the prompt must not be cached yet, or it would not be prefilled remotely
    await cluster.disarm()
    prompt, *other_prompts = oracle.prompts([PROMPT_TOKENS, *OTHER_PROMPT_TOKENS], seed)
    async with client(cluster.urls["router-0"]) as http, client(cluster.urls["router-1"]) as other_http:
        request, handlers = await hold(cluster, http, prompt, phase)
        end_fault = await inject(cluster, subject, fault, handlers)
        try:
            await cluster.disarm(patience_s=1.0 if fault is Fault.STOPPED else TELL_S)
            all_links_cut = subject is Subject.NETWORK and fault in (Fault.KILLED, Fault.STOPPED)
            router_hangs = subject is Subject.ROUTER and fault in (Fault.STOPPED, Fault.CUT_OFF)
            if not all_links_cut:
                await _check_other_requests(oracle, other_http, other_prompts)
            if not all_links_cut and not router_hangs:
                await asyncio.wait([request], timeout=DEADLINE_S)
                assert request.done(), f"the request has not ended within {DEADLINE_S:g} s"
        finally:
            await end_fault()
        await cluster.disarm()
        await asyncio.wait([request], timeout=DEADLINE_S)
        assert request.done(), f"the request has not ended within {DEADLINE_S:g} s of the end of the fault"
        outcome = outcome_of(oracle, prompt, request)
        await cluster.wait_until_healthy()
        if all_links_cut:
            await _check_other_requests(oracle, other_http, other_prompts)
    await cluster.wait_until_idle()
    return outcome


async def hold(
    cluster: FaultCluster, http: httpx.AsyncClient, prompt: list[int], phase: Phase
) -> tuple[asyncio.Task[Answer], Handlers]:
    """Sends a request and returns it when it is held in the phase, with the processes that handle it."""
    role, point, k = _HOLD_AT[phase]
    candidates = [worker for worker in cluster.workers if worker.startswith(role)]
    for worker in candidates:
        await cluster.arm(worker, point, Action.HOLD, k)
    request = asyncio.create_task(complete(http, prompt, stream=True, max_tokens=MAX_TOKENS))
    request.add_done_callback(retrieve_error)
    async with asyncio.timeout(DEADLINE_S):
        while not (holding := [worker for worker in candidates if await cluster.triggered(worker)]):
            assert not request.done(), f"the request ended before it was held: {request}"
    prefill = [name for name in cluster.workers if name.startswith("prefill") and await cluster.any_reached(name)]
    decode = holding if role == "combined" else []
    async with asyncio.timeout(DEADLINE_S):
        while not decode:  # it reports the request a moment later
            decode = await cluster.busy_workers("combined")
    assert len(prefill) == len(decode) == 1, (prefill, decode)
    return request, Handlers(prefill[0], decode[0])


def retrieve_error(request: asyncio.Task[Answer]) -> None:
    """Keeps asyncio from logging the error of a request whose cell failed earlier.

    That log can break pytest's report in Python 3.11 (gh-106905).
    """
    if not request.cancelled():
        request.exception()


EndFault = Callable[[], Awaitable[None]]


async def inject(cluster: FaultCluster, subject: Subject, fault: Fault, handlers: Handlers) -> EndFault:
    """Begins the fault; returns a function that ends it."""
    match subject:
        case Subject.REDIS:
            return await _inject_into_redis(cluster, fault)
        case Subject.NETWORK:
            return await _inject_into_network(cluster, fault, handlers)
        case Subject.PREFILL:
            names = [handlers.prefill]
        case Subject.DECODE:
            names = [handlers.decode]
        case Subject.BOTH_WORKERS:
            names = [handlers.prefill, handlers.decode]
        case Subject.ROUTER:
            names = [handlers.router]
    processes = [cluster.processes[name] for name in names]
    match fault:
        case Fault.KILLED:
            _kill(processes)
            return _calls(*(process.start for process in processes))
        case Fault.STOPPED:
            for process in processes:
                process.signal(signal.SIGSTOP)
            return _calls(*(partial(process.signal, signal.SIGCONT) for process in processes))
        case Fault.RESTARTED:
            _kill(processes)
            for process in processes:
                process.start()
            return _calls()
        case Fault.CUT_OFF:
            assert cluster.network is not None
            for name in names:
                cluster.network.disconnect(name)
            return _calls(*(partial(cluster.network.reconnect, name) for name in names))
        case Fault.SLOW:
            for process in processes:
                process.throttle()
            return _calls(*(process.unthrottle for process in processes))


def _kill(processes: Sequence[Process]) -> None:
    """Kills processes together, and waits until all are gone."""
    for process in processes:
        process.signal(signal.SIGKILL)
    for process in processes:
        process.kill()


async def _inject_into_redis(cluster: FaultCluster, fault: Fault) -> EndFault:
    redis, proxy = cluster.redis, cluster.proxy
    match fault:
        case Fault.KILLED | Fault.RESTARTED:
            os.kill(redis.pid, signal.SIGKILL)
            redis.stop()
            if fault is Fault.KILLED:
                return _calls(redis.start)
            redis.start()
            return _calls()
        case Fault.STOPPED:
            os.kill(redis.pid, signal.SIGSTOP)
            return _calls(lambda: os.kill(redis.pid, signal.SIGCONT))
        case Fault.CUT_OFF:
            proxy.flowing.clear()
            return _calls(proxy.flowing.set)
        case Fault.SLOW:
            proxy.slow = True
            return _calls(lambda: setattr(proxy, "slow", False))


async def _inject_into_network(cluster: FaultCluster, fault: Fault, handlers: Handlers) -> EndFault:
    assert cluster.network is not None
    network, pair = cluster.network, (handlers.prefill, handlers.decode)
    machines = list(cluster.processes)
    match fault:
        case Fault.KILLED | Fault.STOPPED:
            for name in machines:
                network.disconnect(name)

            async def reconnect() -> None:
                await asyncio.sleep(LONG_CUT_S if fault is Fault.KILLED else SHORT_CUT_S)
                for name in machines:
                    network.reconnect(name)

            return reconnect
        case Fault.RESTARTED:
            for name in machines:
                network.disconnect(name)
                network.reconnect(name)
            return _calls()
        case Fault.CUT_OFF:
            network.partition(*pair)
            return _calls(lambda: network.end_partition(*pair))
        case Fault.SLOW:
            for name in pair:
                network.throttle(name)
            return _calls(*(lambda name=name: network.unthrottle(name) for name in pair))


def _calls(*actions: Callable[[], object]) -> EndFault:
    async def end_fault() -> None:
        for action in actions:
            action()

    return end_fault


async def _check_other_requests(oracle: Oracle, http: httpx.AsyncClient, prompts: list[list[int]]) -> None:
    """Sends requests through the other router; all must be answered with the right tokens."""
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(complete(http, prompt, max_tokens=MAX_TOKENS) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == MAX_TOKENS
        oracle.check(prompt, answer.token_ids)


def outcome_of(oracle: Oracle, prompt: list[int], request: asyncio.Task[Answer], tokens: int = MAX_TOKENS) -> str:
    """Returns `right` or the error of a request that has ended.

    Raises:
        AssertionError: A token was wrong, or the error is none of HTTP, of the stream, or of a closed connection.
    """
    error = request.exception()
    if error is None:
        answer = request.result()
        assert len(answer.token_ids) == tokens
        oracle.check(prompt, answer.token_ids)
        return "right"
    assert isinstance(error, httpx.HTTPStatusError | httpx.TransportError), error
    assert not isinstance(error, httpx.TimeoutException), error
    if isinstance(error, httpx.HTTPStatusError):
        assert error.response.status_code in (502, 503), error
    return f"{type(error).__name__}: {error}"

"""Processes are killed and stopped at each step in which one model displaces another from a device that they share.

A cell has a stream run on the victim, asks for the other model, the waker, and holds the displacement in a step. Then
it injects the fault and lets the displacement go on. Whoever is left must be served meanwhile. Afterwards all tokens
are right, both models are served again, and the device's record says what was measured. Memory is measured all the
time: a device for one model must never have two.
"""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.residency.record import Record
from cpd.residency.snapshot import ModelState
from tests.e2e.client import Answer, begin, client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import IDLE_S, TELL_S, TOKEN, FaultCluster
from tests.faults.matrix import DEADLINE_S, MAX_TOKENS, Fault, Handlers, Subject, inject, outcome_of, retrieve_error
from tests.faults.points import Action, Point

VICTIM, WAKER = "combined-0", "combined-1"
MODELS: Mapping[str, str] = {VICTIM: "first", WAKER: "second"}
FAMILIES: Mapping[str, str] = {VICTIM: "qwen3", WAKER: "llama3"}
POOL_BYTES, SLACK_BYTES = 128 << 20, 32 << 20
"""A model's pool, most of its memory; and the rest, with what measurements are off."""
LARGE_BYTES = 100 << 20
"""A pool has at least this size, and little else has."""
STREAM_TOKENS, STEP_S = 200, 0.05
"""A stream that is still running when its model is parked."""
STOPPED_S = 2.0
FAULTS = (Fault.KILLED, Fault.STOPPED)


class DisplacementSubject(Enum):
    """The process that the fault hits."""

    WAKER = "waker"
    VICTIM = "victim"
    ROUTER = "router"
    REDIS = "redis"


class Step(Enum):
    """How far the displacement has come when the fault happens."""

    WAITING = "waiting"
    DRAINING = "draining"
    PARKED = "parked"
    FREED = "freed"
    WAKING = "waking"
    LOADED = "loaded"


_IN_RECORD: Mapping[Step, Callable[[Record], bool]] = {
    Step.WAITING: lambda record: record.intent_of(WAKER) is not None and _state(record, VICTIM) is ModelState.SERVING,
    Step.DRAINING: lambda record: _state(record, VICTIM) is ModelState.DRAINING,
}
"""Steps that last for a while by themselves, and how they are seen."""

_HOLD_AT = {
    Step.PARKED: (VICTIM, Point.RELEASE),
    Step.FREED: (VICTIM, Point.RELEASED),
    Step.WAKING: (WAKER, Point.RESTORE),
    Step.LOADED: (WAKER, Point.RESTORED),
}
"""Where the others are held."""


class SharedDevice(FaultCluster):
    """Two routers, and two workers with models of which one fits into the memory that they share.

    Args:
        models: The checkpoints, by worker.
    """

    names = (VICTIM, WAKER, "router-0", "router-1")

    def __init__(self, models: Mapping[str, Path]) -> None:
        super().__init__(models[VICTIM], transport="nixl")
        self._models = models

    def router_flags(self) -> dict[str, Any]:
        served = [{"name": MODELS[worker], "model": str(model)} for worker, model in self._models.items()]
        return {"models": json.dumps(served)}

    def worker_flags(self, name: str) -> dict[str, Any]:
        return {
            **super().worker_flags(name),
            "model": self._models[name],
            "served-model-name": MODELS[name],
            "kv-memory": POOL_BYTES,
            "device-memory": POOL_BYTES + SLACK_BYTES,
            "fairness": json.dumps({"min_runtime": 1, "max_wait_time": 1}),
            "sleep": json.dumps({"drain_timeout": 1}),
        }

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[Ledger]:
        """The record of the device, past the proxy."""
        socket_path = str(self.directory / "redis.sock")
        async with Redis(unix_socket_path=socket_path, socket_timeout=0.5) as redis:
            yield Ledger(redis, "faults", ClusterSecret(TOKEN), socket.gethostname())

    def pool_bytes(self, worker: str) -> int:
        """Measures how much of a worker's pool is in memory."""
        inherited = _large_pieces(self._fork_server.pid)
        return max(0, _large_pieces(self.processes[worker].pid) - inherited)

    def check_memory(self) -> None:
        """Checks that the device's memory was not given to two."""
        pools = {worker: self.pool_bytes(worker) for worker in self.workers}
        if sum(pools.values()) > POOL_BYTES + SLACK_BYTES:  # one may have given its pool to the other between two looks
            pools = {worker: min(before, self.pool_bytes(worker)) for worker, before in pools.items()}
        assert sum(pools.values()) <= POOL_BYTES + SLACK_BYTES, f"more memory than there is: {pools}"

    async def watch_memory(self) -> None:
        """Checks until it is cancelled."""
        while True:
            await asyncio.to_thread(self.check_memory)
            await asyncio.sleep(0.05)


async def run_displacement_cell(
    cluster: SharedDevice, oracles: Mapping[str, Oracle], subject: DisplacementSubject, fault: Fault, step: Step
) -> list[str]:
    """Runs one cell.

    Args:
        oracles: By worker.

    Returns:
        `right` or the error of the victim's stream, and of the waker's request.

    Raises:
        AssertionError: A token was wrong, a request hung, memory was given to two or is held for ever, or the record is
            wrong.
    """
    await cluster.disarm()
    watching = asyncio.create_task(cluster.watch_memory())
    try:
        async with client(cluster.urls["router-0"]) as http, client(cluster.urls["router-1"]) as other_http:
            await _ask(other_http, oracles, VICTIM)  # now it serves, and the waker sleeps
            await cluster.arm(VICTIM, Point.STEP, Action.DELAY, delay_s=STEP_S)
            prompts = {worker: _prompt(oracle) for worker, oracle in oracles.items()}
            stream = await begin(http, prompts[VICTIM], model=MODELS[VICTIM], max_tokens=STREAM_TOKENS)
            stream.add_done_callback(retrieve_error)
            if step in _HOLD_AT:
                await cluster.arm(*_HOLD_AT[step], Action.HOLD)
            asked = complete(http, prompts[WAKER], model=MODELS[WAKER], stream=True, max_tokens=MAX_TOKENS)
            request = asyncio.create_task(asked)
            request.add_done_callback(retrieve_error)
            await _reached(cluster, step, request)
            assert not stream.done()
            end_fault = await _inject(cluster, subject, fault)
            try:
                await cluster.disarm(patience_s=1.0 if fault is Fault.STOPPED else TELL_S)
                await _others_are_served(other_http, oracles, subject, fault, step, stream, request)
            finally:
                await end_fault()
            await cluster.disarm()
            for one in (stream, request):
                await _ends(one)
            await cluster.wait_until_healthy()
            for worker in (VICTIM, WAKER):
                await _ask(other_http, oracles, worker)
        await cluster.wait_until_idle()
        await _record_is_right(cluster)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return [
        outcome_of(oracles[VICTIM], prompts[VICTIM], stream, STREAM_TOKENS),
        outcome_of(oracles[WAKER], prompts[WAKER], request),
    ]


async def _others_are_served(
    http: Any,
    oracles: Mapping[str, Oracle],
    subject: DisplacementSubject,
    fault: Fault,
    step: Step,
    stream: asyncio.Task[Answer],
    request: asyncio.Task[Answer],
) -> None:
    """Waits for what must go on during the fault. A stopped worker holds what it has."""
    match subject:
        case DisplacementSubject.ROUTER:
            for worker in (WAKER, VICTIM):
                await _ask(http, oracles, worker)
        case DisplacementSubject.VICTIM if fault is Fault.KILLED:
            await _ends(request)
        case DisplacementSubject.WAKER if fault is Fault.KILLED or step not in (Step.WAKING, Step.LOADED):
            await _ends(stream)
        case _:
            await asyncio.sleep(STOPPED_S)


async def _inject(cluster: SharedDevice, subject: DisplacementSubject, fault: Fault) -> Callable[[], Any]:
    handlers = Handlers(prefill=WAKER, decode=VICTIM)
    hits = {
        DisplacementSubject.WAKER: Subject.PREFILL,
        DisplacementSubject.VICTIM: Subject.DECODE,
        DisplacementSubject.ROUTER: Subject.ROUTER,
        DisplacementSubject.REDIS: Subject.REDIS,
    }
    return await inject(cluster, hits[subject], fault, handlers)


async def _reached(cluster: SharedDevice, step: Step, request: asyncio.Task[Answer]) -> None:
    record = None
    async with cluster.ledger() as ledger:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    record = (await ledger.look()).record
                    if step in _HOLD_AT:
                        if await cluster.triggered(*_HOLD_AT[step]):
                            return
                    elif record is not None and _IN_RECORD[step](record):
                        return
                    await asyncio.sleep(0.01)
    raise AssertionError(f"the step {step} was not reached; the request: {request}; the record: {record}")


async def _record_is_right(cluster: SharedDevice) -> None:
    """Waits until the record says what is measured: nobody waits, and each worker reserves what it has."""
    found = ""
    async with cluster.ledger() as ledger:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                while True:
                    with suppress(RedisError, OSError):
                        record = (await ledger.look()).record
                        found = _difference(cluster, record)
                        if not found:
                            return
                    await asyncio.sleep(0.1)
    raise AssertionError(f"the record of the device is wrong: {found}")


def _difference(cluster: SharedDevice, record: Record | None) -> str:
    if record is None:
        return "there is none"
    pids = {one.id: one.owner.pid for one in record.entries}
    if pids != {worker: cluster.processes[worker].pid for worker in cluster.workers} or record.intents:
        return str(record)
    for one in record.entries:
        pool_bytes = cluster.pool_bytes(one.id)
        if (
            one.state not in (ModelState.ASLEEP, ModelState.SERVING)
            or abs(one.reserved_bytes - pool_bytes) > SLACK_BYTES
        ):
            return f"{one}, and {pool_bytes} bytes are in memory"
    return ""


async def _ask(http: Any, oracles: Mapping[str, Oracle], worker: str) -> None:
    """A model is served, with the right tokens."""
    prompt = _prompt(oracles[worker])
    async with asyncio.timeout(DEADLINE_S):
        answer = await complete(http, prompt, model=MODELS[worker], max_tokens=MAX_TOKENS)
    assert len(answer.token_ids) == MAX_TOKENS
    oracles[worker].check(prompt, answer.token_ids)


async def _ends(request: asyncio.Task[Answer]) -> None:
    await asyncio.wait([request], timeout=DEADLINE_S)
    assert request.done(), f"the request has not ended within {DEADLINE_S:g} s"


def _prompt(oracle: Oracle) -> list[int]:
    (prompt,) = oracle.prompts([40], random.randrange(1 << 30))
    return prompt


def _state(record: Record, worker: str) -> ModelState | None:
    found = record.find(worker)
    return None if found is None else found.state


def _large_pieces(pid: int) -> int:
    """Measures how much of the large pieces of a process's own memory is resident."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith(("Size:", "Anonymous:"))]
    return sum(resident for size, resident in zip(sizes[::2], sizes[1::2], strict=True) if size >= LARGE_BYTES)

"""Workers that are killed or stopped at each step of a wake, as processes with real memory.

All of them have a request that never ends, so they take turns, and each step comes again and again.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cpd.residency.ledger import Ledger
from cpd.residency.record import Record
from cpd.residency.snapshot import ModelState
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.waiting import DEADLINE_S
from tests.worker.processes import ROOT
from tests.worker.resident_process import SECRET, private_bytes

pytestmark = pytest.mark.e2e

MIB = 1 << 20
TOTAL, SIZE = 100 * MIB, 64 * MIB
SLACK = 20 * MIB
"""Memory that a process takes besides its model."""
CLUSTER = "residency"
LONG = "600"
"""A request that is parked before it ends."""

Condition = Callable[[Record], bool]


class Child:
    """A worker process."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.resident_process", url, CLUSTER, name, str(TOTAL), str(SIZE)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._baseline: int | None = None

    async def begin(self) -> None:
        """Waits until it has loaded and serves, and sends it a request."""
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), DEADLINE_S)
        assert line.startswith("begun, before it took ")
        self._baseline = int(line.split()[-1])
        self._process.stdin.write(f"{LONG}\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def taken(self) -> int:
        """What its model takes, measured; 0 once it has ended."""
        if self._baseline is None:
            return 0
        try:
            return max(0, private_bytes(self._process.pid) - self._baseline)
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


class Device:
    """The record, and workers of which one fits."""

    def __init__(self, redis: Redis, server: EmbeddedRedis) -> None:
        self.ledger = Ledger(redis, CLUSTER, SECRET, "here")
        self.server = server
        self.workers: dict[str, Child] = {}

    async def start(self, *names: str) -> None:
        """Starts workers, instead of dead ones of these names."""
        for name in names:
            if dead := self.workers.get(name):
                dead.end()
            self.workers[name] = Child(name, self.server.url)
        await asyncio.gather(*(self.workers[name].begin() for name in names))

    def check_memory(self) -> None:
        """Checks that no memory was given away twice."""
        taken = {name: one.taken for name, one in self.workers.items()}
        assert sum(taken.values()) <= TOTAL + SLACK, taken

    async def record(self) -> Record:
        """Returns the record, which must be there."""
        look = await self.ledger.look()
        assert look.record is not None
        return look.record

    async def until(self, condition: Condition) -> Record:
        """Waits until the record meets a condition; checks memory meanwhile."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.check_memory()
                with suppress(OSError, RedisError):
                    look = await self.ledger.look()
                    if look.record is not None and condition(look.record):
                        return look.record
                await asyncio.sleep(0.02)

    async def serves(self, name: str) -> Record:
        """Waits until a worker serves."""
        return await self.until(lambda record: state_of(record, name) is ModelState.SERVING)


def state_of(record: Record, name: str) -> ModelState | None:
    found = record.find(name)
    return None if found is None else found.state


def is_awake(record: Record, name: str) -> bool:
    return state_of(record, name) not in (None, ModelState.ASLEEP)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@asynccontextmanager
async def device(server: EmbeddedRedis) -> AsyncIterator[Device]:
    """Two workers that take turns."""
    async with Redis.from_url(server.url, socket_timeout=0.7) as redis:
        one = Device(redis, server)
        await one.ledger.start(TOTAL)
        try:
            await one.start("waker", "victim")
            yield one
        finally:
            for child in one.workers.values():
                child.end()


@contextmanager
def noted(step: str) -> Iterator[None]:
    """Adds the step to whatever goes wrong in it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the step: {step}")
        raise


STEPS: dict[str, Condition] = {
    "waits": lambda record: record.intent_of("waker") is not None and state_of(record, "victim") is ModelState.SERVING,
    "drains": lambda record: state_of(record, "victim") is ModelState.DRAINING,
    "sleeps": lambda record: state_of(record, "victim") is ModelState.SLEEPING,
    "wakes": lambda record: state_of(record, "waker") is ModelState.WAKING,
    "serves": lambda record: state_of(record, "waker") is ModelState.SERVING,
}


@pytest.mark.parametrize("subject", ["waker", "victim"])
async def test_what_a_killed_worker_held_is_given_on_in_each_step(server: EmbeddedRedis, subject: str) -> None:
    survivor = "victim" if subject == "waker" else "waker"
    async with device(server) as d:
        for step, reached in STEPS.items():
            with noted(step):
                await d.until(reached)
                d.workers[subject].signal(signal.SIGKILL)
                await d.serves(survivor)
                record = await d.until(lambda record: record.find(subject) is None)
                assert record.reserved_bytes == SIZE
                assert abs(d.workers[survivor].taken - SIZE) < SLACK
                assert d.workers[subject].taken == 0
                await d.start(subject)


@pytest.mark.parametrize("subject", ["waker", "victim"])
async def test_a_stopped_worker_keeps_what_it_holds_and_goes_on_later_in_each_step(
    server: EmbeddedRedis, subject: str
) -> None:
    other = "victim" if subject == "waker" else "waker"
    async with device(server) as d:
        for step, reached in STEPS.items():
            with noted(step):
                await d.until(reached)
                d.workers[subject].signal(signal.SIGSTOP)
                held = is_awake(await d.record(), subject)
                for _ in range(75):
                    d.check_memory()
                    record = await d.record()
                    assert is_awake(record, subject) == held
                    assert record.reserved_bytes <= TOTAL
                    await asyncio.sleep(0.02)
                d.workers[subject].signal(signal.SIGCONT)
                for name in (subject, other):
                    await d.serves(name)


async def test_redis_may_be_stopped_or_emptied_meanwhile(server: EmbeddedRedis) -> None:
    async with device(server) as d:
        for step in ("drains", "wakes"):
            for emptied in (True, False):
                with noted(f"{step}, emptied: {emptied}"):
                    await d.until(STEPS[step])
                    if emptied:
                        server.stop()
                        server.start()
                    else:
                        os.kill(server.pid, signal.SIGSTOP)
                        await asyncio.sleep(2)
                        os.kill(server.pid, signal.SIGCONT)
                    for name in ("waker", "victim"):
                        record = await d.serves(name)
                        assert record.reserved_bytes <= TOTAL
                        assert abs(d.workers[name].taken - SIZE) < SLACK


async def test_while_a_waiting_worker_is_stopped_others_get_the_memory(server: EmbeddedRedis) -> None:
    async with device(server) as d:
        await d.until(STEPS["waits"])
        d.workers["waker"].signal(signal.SIGSTOP)
        await d.start("third")
        await d.serves("third")
        d.workers["waker"].signal(signal.SIGCONT)
        await d.serves("waker")

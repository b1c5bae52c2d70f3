"""Workers that are killed or stopped at each step of a wake, as processes with real memory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cpd.residency.ledger import Ledger
from cpd.residency.record import Record
from cpd.residency.snapshot import State
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.waiting import DEADLINE_S
from tests.worker.processes import ROOT
from tests.worker.resident_process import SECRET

pytestmark = pytest.mark.e2e

MIB = 1 << 20
TOTAL, SIZE = 100 * MIB, 64 * MIB
SLACK = 20 * MIB
"""Memory that a process takes besides its model."""
CLUSTER = "residency"
LONG = "60"
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

    async def begun(self) -> None:
        """Waits until it has loaded and serves."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), DEADLINE_S)
        assert line == "begun\n"
        self._baseline = self.private() - SIZE

    def request(self, seconds: str) -> None:
        """Sends it a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def private(self) -> int:
        """Resident memory; 0 once it has ended."""
        try:
            _, resident, shared = map(int, Path(f"/proc/{self._process.pid}/statm").read_text().split()[:3])
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    @property
    def taken(self) -> int:
        """What its model takes, measured."""
        return max(0, self.private() - (self._baseline or 0)) if self._baseline is not None else 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


class Device:
    """The record, and two workers of which one fits."""

    def __init__(self, redis: Redis, server: EmbeddedRedis, workers: dict[str, Child]) -> None:
        self.ledger = Ledger(redis, CLUSTER, SECRET, "here")
        self.server = server
        self.workers = workers

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
        return await self.until(lambda record: state_of(record, name) is State.SERVING)


def state_of(record: Record, name: str) -> State | None:
    found = record.find(name)
    return None if found is None else found.state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@asynccontextmanager
async def device(server: EmbeddedRedis) -> AsyncIterator[Device]:
    """A victim that serves a long request, and a waker that sleeps."""
    async with Redis.from_url(server.url, socket_timeout=0.7) as redis:
        await Ledger(redis, CLUSTER, SECRET, "here").start(TOTAL)
        workers: dict[str, Child] = {}
        try:
            for name in ("waker", "victim"):
                workers[name] = Child(name, server.url)
                await workers[name].begun()
            one = Device(redis, server, workers)
            await one.until(lambda record: state_of(record, "waker") is None)
            workers["victim"].request(LONG)
            yield one
        finally:
            for child in workers.values():
                child.end()


STEPS: dict[str, Condition] = {
    "waits": lambda record: record.intent_of("waker") is not None and state_of(record, "victim") is State.SERVING,
    "drains": lambda record: state_of(record, "victim") is State.DRAINING,
    "sleeps": lambda record: state_of(record, "victim") is State.SLEEPING,
    "wakes": lambda record: state_of(record, "waker") is State.WAKING,
    "serves": lambda record: state_of(record, "waker") is State.SERVING,
}


@pytest.mark.parametrize("subject", ["waker", "victim"])
@pytest.mark.parametrize("step", STEPS)
async def test_what_a_killed_worker_held_is_given_on(server: EmbeddedRedis, step: str, subject: str) -> None:
    async with device(server) as d:
        d.workers["waker"].request(LONG)
        await d.until(STEPS[step])
        d.workers[subject].signal(signal.SIGKILL)
        survivor = "victim" if subject == "waker" else "waker"
        d.workers[survivor].request(LONG)
        record = await d.serves(survivor)
        record = await d.until(lambda record: record.find(subject) is None)
        assert record.reserved_bytes == SIZE
        assert abs(d.workers[survivor].taken - SIZE) < SLACK
        assert d.workers[subject].taken == 0


@pytest.mark.parametrize("subject", ["waker", "victim"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_stopped_worker_keeps_what_it_holds_and_goes_on_later(
    server: EmbeddedRedis, step: str, subject: str
) -> None:
    async with device(server) as d:
        d.workers["waker"].request(LONG)
        await d.until(STEPS[step])
        d.workers[subject].signal(signal.SIGSTOP)
        other = "victim" if subject == "waker" else "waker"
        d.workers[other].request(LONG)
        held = state_of(await d.record(), subject) is not None
        for _ in range(75):
            d.check_memory()
            record = await d.record()
            assert (state_of(record, subject) is not None) == held
            assert record.reserved_bytes <= TOTAL
            await asyncio.sleep(0.02)
        d.workers[subject].signal(signal.SIGCONT)
        for name in (subject, other, subject):
            await d.serves(name)


@pytest.mark.parametrize("emptied", [True, False])
@pytest.mark.parametrize("step", ["drains", "wakes"])
async def test_redis_may_be_stopped_or_emptied_meanwhile(server: EmbeddedRedis, step: str, emptied: bool) -> None:
    async with device(server) as d:
        d.workers["waker"].request(LONG)
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
        d.workers["waker"].request(LONG)
        await d.until(STEPS["waits"])
        d.workers["waker"].signal(signal.SIGSTOP)
        d.workers["third"] = third = Child("third", server.url)
        await third.begun()
        third.request(LONG)
        await d.serves("third")
        d.workers["waker"].signal(signal.SIGCONT)
        await d.serves("waker")

"""`python -m tests.worker.resident_process URL CLUSTER NAME TOTAL SIZE`: a worker whose model is only memory.

Reads a line for each request from standard input: the seconds that it runs. When it serves, it says so and how much
memory it took before it loaded.
"""

import asyncio
import mmap
import os
import sys
import time
from itertools import count
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cpd.common.process_identity import ProcessIdentity
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.residency.record import Entry, Owner
from cpd.residency.rule import Rule
from cpd.residency.snapshot import ModelState
from cpd.residency.turn import Own
from worker.residency import Residency
from worker.resident import Facts

SECRET = ClusterSecret("the secret of the tests")
STEP_S = 0.4
"""Time of each step, so that a test can interfere."""


class Model:
    """A `Resident`. Its requests take their time only while it is awake and not parked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.took_s: dict[str, float] = {}
        self._memory: mmap.mmap | None = None
        self._waiting: list[float] = []
        self._running: dict[int, tuple[asyncio.TimerHandle, float]] = {}
        self._numbers = count()
        self._takes = True
        self._last_access = time.monotonic()

    @property
    def state(self) -> ModelState:
        return ModelState.ASLEEP if self._memory is None else ModelState.SERVING

    def load(self) -> int:
        self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, self._size, mmap.PAGESIZE):
            self._memory[offset] = 1
        return self._size

    def request(self, seconds: float) -> None:
        self._last_access = time.monotonic()
        if self._memory is not None and self._takes:
            self._run(seconds)
        else:
            self._waiting.append(seconds)

    def _run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        handle = loop.call_later(seconds, self._running.pop, number)
        self._running[number] = handle, seconds

    async def wake(self) -> int:
        await asyncio.sleep(STEP_S / 2)
        size = self.load()
        await asyncio.sleep(STEP_S / 2)
        self.undrain()
        return size

    async def stage(self) -> None:
        raise AssertionError("there is no memory for staged weights")

    def unstage(self) -> None:
        raise AssertionError("there are no staged weights")

    def drain(self) -> None:
        self._takes = False

    def undrain(self) -> None:
        self._takes = True
        waiting, self._waiting = self._waiting, []
        for seconds in waiting:
            self._run(seconds)

    async def sleep(self) -> int:
        for handle, seconds in self._running.values():
            handle.cancel()
            self._waiting.append(seconds)
        self._running.clear()
        await asyncio.sleep(STEP_S / 2)
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        await asyncio.sleep(STEP_S / 2)
        return 0

    def facts(self, now: float) -> Facts:
        return Facts(len(self._waiting), len(self._running), 0, [], 0.0, 0.0, self._last_access, 0)


def private_bytes(pid: int) -> int:
    """Returns the resident memory that a process shares with no other."""
    _, resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


async def run(url: str, cluster: str, name: str, total: int, size: int) -> None:
    redis = Redis.from_url(url, socket_timeout=0.7, socket_connect_timeout=0.7, retry=Retry(NoBackoff(), 0))
    times = {"min_runtime_s": 0.3, "max_wait_time_s": 0.3, "drain_timeout_s": 0.3, "wake_s": STEP_S, "sleep_s": STEP_S}
    entry = Entry(name, name, "combined", Owner.of(ProcessIdentity.own()), size, **times)  # type: ignore[arg-type]
    failed = asyncio.get_running_loop().create_future()
    residency = Residency(
        Ledger(redis, cluster, SECRET, "here"),
        Rule(),
        Own(entry, total, fingerprint=name),
        fail=lambda reason, _: failed.set_exception(AssertionError(reason)),
        changed=lambda: None,
        on_failure=failed.set_exception,
    )
    model = Model(size)
    await residency.take_turn()
    before = private_bytes(os.getpid())
    await residency.begin(model, model.load())
    sys.stdout.write(f"begun, before it took {before}\n")
    sys.stdout.flush()

    async def requests() -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            model.request(float(line))
            residency.request_arrived()

    reading = asyncio.create_task(requests())
    await asyncio.wait([reading, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))

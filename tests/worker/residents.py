"""Models without weights that share a device, and the workers around them."""

import asyncio
import time
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from cpd.common.process_identity import ProcessIdentity
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.residency.predicted import Predicted
from cpd.residency.record import Entry, Owner
from cpd.residency.rule import Rule
from cpd.residency.snapshot import ModelState
from cpd.residency.turn import Own
from tests.waiting import DEADLINE_S, eventually
from worker.residency import Residency
from worker.resident import Facts

GIB = 1 << 30


@dataclass
class Memory:
    """The device's memory. Taking more than there is fails the test."""

    total: int
    taken: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, size: int) -> None:
        self.taken[name] = size
        assert sum(self.taken.values()) <= self.total, f"more memory than there is: {self.taken}"


class FakeResident:
    """A `Resident`. Tests set its numbers of requests.

    Attributes:
        log: What it was told, in order.
        fails: The next wakes raise these.
        held: What it does not give back when it sleeps.
        gate: Wakes and sleeps wait for it.
    """

    def __init__(self, name: str, size: int, memory: Memory) -> None:
        self.state, self.took_s = ModelState.SERVING, {"copy": 0.25}
        self.name, self.size, self.memory = name, size, memory
        self.waiting = self.running = self.staged = self.held = 0
        self.last_access = time.monotonic()
        self.log: list[str] = []
        self.fails: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def wake(self) -> int:
        self.log.append("wake")
        self.state = ModelState.WAKING
        await self.gate.wait()
        if self.fails:
            self.state = ModelState.ASLEEP
            raise self.fails.pop(0)
        self.memory.take(self.name, self.size)
        self.state = ModelState.SERVING
        self.running, self.waiting = self.running + self.waiting, 0
        return self.size

    async def stage(self) -> None:
        self.log.append("stage")
        self.staged = self.size // 2

    def unstage(self) -> None:
        self.log.append("unstage")
        self.staged = 0

    def drain(self) -> None:
        self.log.append("drain")
        self.state = ModelState.DRAINING

    def undrain(self) -> None:
        self.log.append("undrain")
        self.state = ModelState.SERVING
        self.running, self.waiting = self.running + self.waiting, 0

    async def sleep(self) -> int:
        self.log.append("sleep")
        self.state = ModelState.SLEEPING
        await self.gate.wait()
        self.waiting, self.running = self.waiting + self.running, 0
        self.memory.take(self.name, self.held)
        self.state = ModelState.ASLEEP
        return self.held

    def facts(self, now: float) -> Facts:
        return Facts(self.waiting, self.running, 0, [now + 60] * self.running, 1.0, 0.1, self.last_access, self.staged)


class SharingWorker:
    """A worker that shares a device with others of this process. Each is its own process for the record."""

    def __init__(
        self,
        number: int,
        size: int,
        memory: Memory,
        redis: Redis,
        cluster: str,
        *,
        expected: int | None = None,
        predicted: bool = False,
        staging: int = 0,
        role: str = "combined",
        model: str = "",
        total: int = 0,
        **fields: float | bool,
    ) -> None:
        own = ProcessIdentity.own()
        self.name = f"w{number}"
        self.failed: list[str] = []
        self.retry_after_s = 0.0
        self.broken: list[BaseException] = []
        self.resident = FakeResident(self.name, size, memory)
        settings = {"min_runtime_s": 0.3, "max_wait_time_s": 0.2, "drain_timeout_s": 0.3, "wake_s": 0.5, "sleep_s": 0.1}
        self.owner = Owner.of(
            replace(own, pid_namespace=own.pid_namespace + 1 + number)
        )  # nobody sees that it has ended
        self.ledger = Ledger(redis, cluster, ClusterSecret("secret"), "here")
        entry = Entry(
            self.name,
            model or f"model-{number}",
            role,
            self.owner,
            size if expected is None else expected,
            **{**settings, **fields},  # type: ignore[arg-type]
        )
        self.residency = Residency(
            self.ledger,
            Predicted() if predicted else Rule(),
            Own(entry, total or memory.total, fingerprint=f"f{number}"),
            staging_bytes=staging,
            fail=self.fail,
            changed=lambda: None,
            on_failure=self.broken.append,
        )

    def fail(self, reason: str, retry_after_s: float) -> None:
        self.failed.append(reason)
        self.retry_after_s = retry_after_s
        self.resident.waiting = 0

    async def start(self) -> None:
        """Waits for its turn, loads, and begins."""
        await asyncio.wait_for(self.residency.take_turn(), DEADLINE_S)
        self.resident.memory.take(self.name, self.resident.size)
        await asyncio.wait_for(self.residency.begin(self.resident, self.resident.size), DEADLINE_S)

    def request(self) -> None:
        """A request arrives."""
        self.resident.last_access = time.monotonic()
        if self.is_serving:
            self.resident.running += 1
        else:
            self.resident.waiting += 1
        self.residency.request_arrived()

    @property
    def state(self) -> str:
        return _STATES[self.residency.report().state]

    @property
    def is_serving(self) -> bool:
        return self.state == "serving"

    async def becomes(self, state: str) -> None:
        """Waits for a state."""
        await eventually(lambda: self.state == state)


_STATES = {1: "serving", 2: "asleep", 3: "waking", 4: "draining"}

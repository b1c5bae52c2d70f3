"""A device's record and the workers on it, without Redis, processes and time of their own."""

from dataclasses import dataclass, field, replace

from cpd.residency.record import SETTLE_S, Activity, Entry, Owner, Record, SeenActivity, dump, parse_record, without
from cpd.residency.rule import Rule
from cpd.residency.snapshot import ModelState, ResidencyPolicy
from cpd.residency.turn import Own, Turn, turn


def owner(number: int) -> Owner:
    return Owner("00" * 16, 1, 100 + number, 1_000 + number)


def entry(number: int, memory_bytes: int, **fields: float | str | bool | ModelState) -> Entry:
    given = {"model": f"model-{number}", "role": "combined", "min_runtime_s": 10.0, "max_wait_time_s": 5.0}
    given |= {"drain_timeout_s": 30.0, "wake_s": 1.0, "sleep_s": 0.1, **fields}
    return Entry(id=f"w{number}", owner=owner(number), memory_bytes=memory_bytes, **given)  # type: ignore[arg-type]


@dataclass(eq=False)
class Worker:
    """A worker, and what its memory really is.

    Attributes:
        really: What its model takes while it is awake.
        waiting: Number of requests that wait.
        running: Number of requests that run.
        intent: Whether it has written one that has not ended.
        read: What it has read and not yet written: version, whole record and turn.
    """

    own: Own
    really: int
    waiting: int = 0
    running: int = 0
    alive: bool = True
    intent: bool = False
    read: tuple[int, Turn] | None = None
    failures: list[str] = field(default_factory=list)
    last_access_s: float = 0.0

    @property
    def name(self) -> str:
        return self.own.entry.id

    @property
    def held(self) -> int:
        """Memory that it takes now."""
        if not self.alive or self.own.state is ModelState.ASLEEP:
            return 0
        return self.really


class World:
    """Redis and the workers. The record goes through JSON at each write.

    Attributes:
        number: Version of the record.
    """

    def __init__(self, total: int, workers: list[Worker], policy: ResidencyPolicy | None = None) -> None:
        self.now = 1_000_000.0
        self.total = total
        self.workers = {one.name: one for one in workers}
        self.policy = policy or Rule()
        self.record: Record | None = Record(total)
        self.number = 1
        self.activities: dict[str, SeenActivity] = {}

    def look(self, worker: Worker) -> None:
        """A worker reads, and takes its turn."""
        activity = Activity(worker.waiting, worker.running, last_access_s=worker.last_access_s)
        self.activities[worker.own.entry.owner.key] = SeenActivity(self.now, activity)
        gone = [one.own.entry.owner for one in self.workers.values() if not one.alive]
        record = without(self.record or Record(self.total, self.now + SETTLE_S), gone)
        worker.own = replace(worker.own, wants=worker.waiting > 0)
        worker.read = self.number, turn(record, self.activities, worker.own, self.policy, self.now)

    def write(self, worker: Worker) -> bool:
        """The worker writes what it has read last, and acts on it; False: somebody else was faster."""
        assert worker.read is not None
        (number, taken), worker.read = worker.read, None
        if number != self.number:
            return False
        if taken.record != self.record:
            self.record, self.number = parse_record(dump(taken.record)), number + 1
            assert self.record == taken.record
        self._act(worker, taken)
        return True

    def step(self, worker: Worker) -> None:
        """The worker looks and writes, undisturbed."""
        self.look(worker)
        assert self.write(worker)

    def load_ends(self, worker: Worker, *, failed: bool = False) -> None:
        """A load that is under way ends."""
        state = ModelState.ASLEEP if failed else ModelState.SERVING
        own = worker.own if failed else replace(worker.own, entry=replace(worker.own.entry, memory_bytes=worker.really))
        worker.own = replace(own, state=state, measured=own.measured or not failed)
        worker.read = None  # a worker looks again after each change of its own
        if failed:
            worker.waiting = 0

    def sleep_ends(self, worker: Worker) -> None:
        """The memory of a worker that goes to sleep is free."""
        worker.own = replace(worker.own, state=ModelState.ASLEEP)
        worker.read = None

    def request(self, worker: Worker) -> None:
        """A request arrives."""
        worker.last_access_s = self.now
        if worker.own.state is ModelState.SERVING:
            worker.running += 1
        else:
            worker.waiting += 1

    def lose(self) -> None:
        """Redis is emptied."""
        self.record = None
        self.number += 1
        self.activities = {}

    def _act(self, worker: Worker, taken: Turn) -> None:
        state, own = taken.entry.state, worker.own
        intent = taken.record.intent_of(taken.entry.id)
        worker.intent = intent is not None
        if taken.failed:
            worker.failures.append(taken.failed)
            worker.waiting = 0
        own = replace(own, intent_s=None if intent is None else (intent.since_s, intent.latest_s))
        if state is ModelState.WAKING and own.state is ModelState.ASLEEP:
            own = replace(own, state=ModelState.WAKING)
        elif state is ModelState.SLEEPING and own.state.has_memory:
            own = replace(own, state=ModelState.SLEEPING)
            worker.waiting, worker.running = worker.waiting + worker.running, 0
        elif own.state.has_memory:
            own = replace(
                own,
                state=state if state is ModelState.DRAINING else ModelState.SERVING,
                sleep=False,
                starts=False,
            )
            if state is ModelState.SERVING:
                worker.running, worker.waiting = worker.running + worker.waiting, 0
        worker.own = own


def worker(number: int, memory_bytes: int, *, really: int | None = None, total: int = 10, **fields: float) -> Worker:
    """A worker that is asleep, and expects to take `memory_bytes`."""
    own = Own(entry(number, memory_bytes, **fields), total, fingerprint=f"f{number}")
    return Worker(own, memory_bytes if really is None else really)

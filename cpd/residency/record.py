"""The record of a device: which of the workers on it are awake, which wait to be, and what memory is reserved. Pure.

Each worker is an *entry*, and in one of these states; all but `asleep` reserve the memory that it takes while awake:

    asleep ──▶ waking ──▶ serving ──▶ draining ──▶ sleeping ──▶ asleep
       ▲          │          ▲────────────┘
       └──────────┘          nobody needs the memory any more
        the wake failed

`waking` is the wake lock: at most one entry has it. A worker that is not serving and has requests has an *intent*; they
are listed in the order in which they were written. Entries and intents end by transitions of the worker that they
belong to, or when its process is proved gone (`without`).

The record is JSON in Redis (`ledger.py`), where every change is a compare-and-swap on the record that it was computed
from. Beside it each worker writes its *activity*: figures that decide who is displaced and when, but never what is
reserved. Nobody computes with them later than when they were read, so they need no compare-and-swap.

All times are seconds of Redis's clock.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from cpd.common.errors import CPDError
from cpd.common.process_identity import ProcessIdentity
from cpd.residency.bound import longest_wait_s
from cpd.residency.snapshot import Device, Fairness, Intent, Model, ModelState, Occupant, SleepSettings

SILENT_S = 5.0
"""A worker that was not seen for this long is silent: its intent waits, and it is no victim. It keeps what it holds."""

SETTLE_S = 5.0
"""Time in which workers write themselves back into a record that was lost."""

MOST_DEADLINES = 1000
"""Most deadlines in an activity, the first ones."""

MOST_S = 1e12
"""Largest number of seconds in a record."""

Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Number = Annotated[int, Field(ge=0, le=1 << 32)]
Time = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]


class UnreadableRecordError(CPDError):
    """A record or activity is damaged, or was written by something else."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that an entry belongs to; see `ProcessIdentity`."""

    boot: str
    pid_namespace: Number
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    started: Annotated[int, Field(ge=0)]

    @classmethod
    def of(cls, process: ProcessIdentity) -> "Owner":
        """Returns this process as an owner."""
        return cls(process.boot.hex(), process.pid_namespace, process.pid, process.started)

    @property
    def key(self) -> str:
        """Its name in Redis, different for all processes."""
        return f"{self.boot}-{self.pid_namespace}-{self.pid}-{self.started}"

    def is_gone(self, observer: ProcessIdentity) -> bool:
        """True if `observer`, which must be the calling process, sees that this process has ended.

        False if it can't tell: another machine or boot, another PID namespace, or no file descriptor left.
        """
        try:
            process = ProcessIdentity(bytes.fromhex(self.boot), self.pid_namespace, self.pid, self.started)
            return observer.sees(process) and not process.alive
        except (OSError, OverflowError, ValueError):
            return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A worker on the device.

    Attributes:
        id: Its name, different from all others' in the record.
        memory_bytes: What it takes while it is awake: measured, or estimated before its first wake.
        held_bytes: What it was still holding when it last went to sleep, part of `memory_bytes`.
        since_s: When the state began.
        needed_by: While it drains: the worker that needs the memory; empty if it was sent to sleep by hand.
        wake_s: Predicted time of a wake from disk.
        staged_wake_s: Predicted time of a wake from staged weights.
        sleep_s: Predicted time to free the memory.
        popular: As `Fairness.popular`; the following ones as in `Fairness` and `SleepSettings`, too.
    """

    id: str
    model: str
    role: str
    owner: Owner
    memory_bytes: Bytes
    held_bytes: Bytes = 0
    state: ModelState = ModelState.ASLEEP
    since_s: Time = 0.0
    needed_by: str = ""
    wake_s: Time = 0.0
    staged_wake_s: Time = 0.0
    sleep_s: Time = 0.0
    popular: bool = False
    min_runtime_s: Time = 0.0
    max_wait_time_s: Time = 0.0
    idle_timeout_s: Time = 0.0
    drain_timeout_s: Time = 0.0

    @property
    def reserved_bytes(self) -> int:
        """Memory that nobody else may take."""
        return self.held_bytes if self.state is ModelState.ASLEEP else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Waiting:
    """An intent: a worker that is not serving, and should.

    Attributes:
        worker: Its `Entry.id`.
        since_s: When it was written.
        latest_s: When the worker serves or has failed at the latest, as promised then.
    """

    worker: str
    since_s: Time
    latest_s: Time


@dataclass(frozen=True, slots=True)
class Record:
    """The record.

    Attributes:
        total_bytes: The device's memory for models.
        settles_at_s: Nobody may wake before: the record was lost, and not all workers may be back in it.
        measured: Memory that a model took when it was last awake, by a fingerprint of model and settings.
        pins: Names of the workers that nobody may displace.
    """

    total_bytes: Bytes
    settles_at_s: Time = 0.0
    entries: tuple[Entry, ...] = ()
    intents: tuple[Waiting, ...] = ()
    measured: Mapping[str, Bytes] = field(default_factory=dict)
    pins: tuple[str, ...] = ()

    def find(self, worker: str) -> Entry | None:
        """Returns the entry with this name."""
        return next((one for one in self.entries if one.id == worker), None)

    def get(self, worker: str) -> Entry:
        """Returns the entry with this name, which must be there."""
        return next(one for one in self.entries if one.id == worker)

    def of(self, owner: Owner) -> Entry | None:
        """Returns the entry of a process."""
        return next((one for one in self.entries if one.owner == owner), None)

    def intent_of(self, worker: str) -> Waiting | None:
        """Returns a worker's intent."""
        return next((one for one in self.intents if one.worker == worker), None)

    @property
    def reserved_bytes(self) -> int:
        """Memory that is reserved. More than `total_bytes` only if the record was lost while a worker was stopped."""
        return sum(one.reserved_bytes for one in self.entries)


@dataclass(frozen=True, slots=True)
class Activity:
    """Figures about a worker's requests.

    Attributes:
        waiting: Number of requests that wait.
        running: Number of running ones.
        resumed: Number of those that were parked before.
        deadlines: While it is awake: when each running request misses its target if it pauses now. Otherwise: when each
            waiting one does if it waits on. Ascending.
        drain_s: Predicted time until the running ones have ended.
        arrivals_per_s: Recent requests a second.
        last_access_s: When the last one arrived.
        staged_bytes: Size of the staged weights.
    """

    waiting: Number = 0
    running: Number = 0
    resumed: Number = 0
    deadlines: tuple[Time, ...] = ()
    drain_s: Time = 0.0
    arrivals_per_s: Time = 0.0
    last_access_s: Time = 0.0
    staged_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class SeenActivity:
    """The activity of a worker, and when it wrote it."""

    seen_s: float
    activity: Activity = Activity()


Activities = Mapping[str, SeenActivity]
"""The last one of each process, by `Owner.key`."""

_NEVER = SeenActivity(float("-inf"))
_RECORD, _ACTIVITY = TypeAdapter(Record), TypeAdapter(Activity)


# ---- JSON ----


def dump(value: Record | Activity) -> bytes:
    """Returns a record or activity as JSON."""
    return orjson.dumps(value)


def parse_record(data: bytes) -> Record:
    """Reads a record. Unknown fields are ignored, so a newer version may add some.

    Raises:
        UnreadableRecordError: It is no record, or contradicts itself.
    """
    try:
        record = _RECORD.validate_json(data, strict=True)
    except ValidationError as error:
        raise UnreadableRecordError(_first(error)) from None
    names = [one.id for one in record.entries]
    for what, keys in (
        ("entries of one name", names),
        ("entries of one process", [one.owner for one in record.entries]),
        ("intents of one worker", [one.worker for one in record.intents]),
    ):
        if len(set(keys)) < len(keys):
            raise UnreadableRecordError(f"it has two {what}")
    if not {one.worker for one in record.intents} <= set(names):
        raise UnreadableRecordError("it has an intent of a worker that is not in it")
    return record


def parse_activity(data: bytes) -> Activity:
    """Reads an activity. Unknown fields are ignored.

    Raises:
        UnreadableRecordError: It is none.
    """
    try:
        return _ACTIVITY.validate_json(data, strict=True)
    except ValidationError as error:
        raise UnreadableRecordError(_first(error)) from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ": ".join((*map(str, first["loc"]), first["msg"]))


# ---- what the policy sees ----


def snapshot(record: Record, activities: Activities, now: float) -> Device:
    """Returns the device as a policy sees it. Intents of silent workers are left out.

    What workers hold while they sleep belongs neither to the device's memory nor to that of their models there.
    """
    models = {one.id: _model(one, pinned=one.id in record.pins) for one in record.entries}
    seen = {one.id: activities.get(one.owner.key, _NEVER) for one in record.entries}
    occupants = []
    for one in record.entries:
        activity = seen[one.id].activity
        if one.state is not ModelState.ASLEEP:
            occupants.append(
                Occupant(
                    models[one.id],
                    one.state,
                    one.since_s,
                    activity.last_access_s,
                    activity.running,
                    activity.resumed,
                    activity.deadlines,
                    activity.drain_s,
                    activity.arrivals_per_s,
                    not _is_silent(seen[one.id], now),
                )
            )
    intents = []
    for waiting in record.intents:
        one, activity = record.get(waiting.worker), seen[waiting.worker].activity
        if one.state is ModelState.WAKING or _is_silent(seen[one.id], now):
            continue
        wake_s = one.staged_wake_s if activity.staged_bytes else one.wake_s
        deadlines = () if one.state is ModelState.DRAINING else activity.deadlines  # those are of running requests
        intents.append(Intent(models[one.id], waiting.since_s, waiting.latest_s, deadlines, wake_s))
    memory_bytes = record.total_bytes - sum(one.held_bytes for one in record.entries)
    return Device(memory_bytes, list(models.values()), occupants, intents)


def _is_silent(seen: SeenActivity, now: float) -> bool:
    return now - seen.seen_s >= SILENT_S


def _model(one: Entry, *, pinned: bool) -> Model:
    return Model(
        one.id,
        max(1, one.memory_bytes - one.held_bytes),
        Fairness(min_runtime_s=one.min_runtime_s, max_wait_time_s=one.max_wait_time_s, popular=one.popular or pinned),
        SleepSettings(idle_timeout_s=one.idle_timeout_s, drain_timeout_s=one.drain_timeout_s),
        one.wake_s,
        one.sleep_s,
    )


# ---- transitions ----


def joined(record: Record, entry: Entry) -> Record:
    """Adds the entry of a process that has none. The entry of another process with its name gets another name."""
    entries, intents = list(record.entries), list(record.intents)
    for index, one in enumerate(entries):
        if one.id == entry.id:
            name = f"{one.id} (process {one.owner.pid}, started at {one.owner.started})"
            entries[index] = replace(one, id=name)
            intents = [replace(each, worker=name) if each.worker == one.id else each for each in intents]
    return replace(record, entries=(*entries, entry), intents=tuple(intents))


def without(record: Record, owners: Collection[Owner]) -> Record:
    """Removes the entries and intents of processes that are proved gone, or hold nothing any more."""
    if not owners:
        return record
    left = tuple(one for one in record.entries if one.owner not in owners)
    names = {one.id for one in left}
    return replace(record, entries=left, intents=tuple(one for one in record.intents if one.worker in names))


def entered(record: Record, worker: str, state: ModelState, since_s: float, needed_by: str = "") -> Record:
    """Moves a worker to a state."""
    entries = [
        replace(one, state=state, since_s=since_s, needed_by=needed_by) if one.id == worker else one
        for one in record.entries
    ]
    return replace(record, entries=tuple(entries))


def fits(record: Record, entry: Entry, memory_bytes: int) -> bool:
    """Whether a worker can be awake with so much memory beside what others have reserved."""
    return record.reserved_bytes - entry.reserved_bytes + memory_bytes <= record.total_bytes


def woken(record: Record, worker: str, now: float) -> Record:
    """Gives a worker the wake lock; no change if it can't have it."""
    entry = record.find(worker)
    locked = any(one.state is ModelState.WAKING for one in record.entries)
    if entry is None or entry.state is not ModelState.ASLEEP or locked or now < record.settles_at_s:
        return record
    if not fits(record, entry, entry.memory_bytes):
        return record
    return entered(record, worker, ModelState.WAKING, now)


def drained(record: Record, worker: str, needed_by: str, now: float) -> Record:
    """Makes a serving worker drain; no change if it does not serve.

    The only transition that another worker may write: whoever sees that a victim is needed. If only the victim could,
    two busy workers that each take the other one for the better victim would never agree.
    """
    entry = record.find(worker)
    if entry is None or entry.state is not ModelState.SERVING:
        return record
    return entered(record, worker, ModelState.DRAINING, now, needed_by)


def serves(record: Record, worker: str, since_s: float) -> Record:
    """A worker serves, and so has no intent any more. Its `min_runtime` is counted from `since_s`."""
    return unwanted(entered(record, worker, ModelState.SERVING, since_s), worker)


def wanted(
    record: Record, worker: str, activities: Activities, now: float, since_s: float | None = None, latest_s: float = 0.0
) -> Record:
    """Writes a worker's intent, unless it has one.

    Args:
        since_s: When it was written first, if the record was lost since; then `latest_s` is what was promised.
    """
    if record.intent_of(worker) is not None:
        return record
    if since_s is not None:
        mine = Waiting(worker, since_s, latest_s)
        before = [one for one in record.intents if one.since_s <= since_s]
        return replace(record, intents=(*before, mine, *(one for one in record.intents if one.since_s > since_s)))
    drafted = replace(record, intents=(*record.intents, Waiting(worker, now, now)))
    device = snapshot(drafted, activities, now)
    mine = Waiting(worker, now, now + longest_wait_s(device, device.intents, now))
    return replace(record, intents=(*record.intents, mine))


def unwanted(record: Record, worker: str) -> Record:
    """Removes a worker's intent."""
    return replace(record, intents=tuple(one for one in record.intents if one.worker != worker))


def pinned(record: Record, worker: str, pin: bool) -> Record:
    """Pins a worker, or no longer."""
    pins = {*record.pins, worker} if pin else set(record.pins) - {worker}
    return replace(record, pins=tuple(sorted(pins)))


def measured(record: Record, fingerprint: str, memory_bytes: int) -> Record:
    """Notes what a model takes."""
    return replace(record, measured={**record.measured, fingerprint: memory_bytes})


def drops_staged(record: Record, activities: Activities, worker: str, staging_bytes: int, now: float) -> bool:
    """Whether a worker must drop its staged weights: together they exceed the budget, and its own are the least
    recently used."""
    staged: list[tuple[float, str, int]] = []
    for one in record.entries:
        activity = activities.get(one.owner.key, _NEVER).activity
        if activity.staged_bytes:
            staged.append((activity.last_access_s, one.id, activity.staged_bytes))
    excess = sum(size for _, _, size in staged) - staging_bytes
    for _, name, size in sorted(_free_to_drop(staged, record, activities, now)):
        if excess <= 0:
            return False
        if name == worker:
            return True
        excess -= size
    return False


def _free_to_drop(
    staged: Iterable[tuple[float, str, int]], record: Record, activities: Activities, now: float
) -> Sequence[tuple[float, str, int]]:
    """Leaves out workers that are waking from their staged weights, and silent ones, which drop nothing."""
    free = {
        one.id
        for one in record.entries
        if one.state is not ModelState.WAKING and not _is_silent(activities.get(one.owner.key, _NEVER), now)
    }
    return [one for one in staged if one[1] in free]

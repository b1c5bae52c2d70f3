"""What one worker does when it looks at its device's record. Pure.

A turn brings the record up to what the worker knows about itself, asks the policy, and carries out in the record what
concerns this worker. The worker then writes the record by compare-and-swap, and only if that succeeds acts on it:

    in the record   really                it
    waking          asleep                loads the model
    draining        serving               takes no new requests
    serving         draining              takes requests again
    sleeping        serving or draining   parks what still runs, and frees the memory

If the write fails, somebody else has changed the record: the turn begins again with that record. So it does not matter
which worker looks when, and there is no leader that could be lost. Of the policy's actions for others only `Drain` is
carried out (`record.drained`).
"""

from dataclasses import dataclass, replace

from cpd.residency.record import (
    Activities,
    Entry,
    Record,
    drained,
    entered,
    fits,
    joined,
    measured,
    pinned,
    serves,
    snapshot,
    unwanted,
    wanted,
    woken,
)
from cpd.residency.snapshot import Action, Drain, Fail, ModelState, ResidencyPolicy, Sleep, Stage, Wake


@dataclass(frozen=True, slots=True)
class Own:
    """What a worker knows about itself.

    Attributes:
        entry: Its description, without `state`, `since_s` and `needed_by`: these are of the record only.
        total_bytes: The device's memory by its settings.
        state: What it really is.
        fingerprint: Under which `Record.measured` has its memory.
        measured: Whether `entry.memory_bytes` was measured, and not estimated.
        starts: It has not served yet.
        wants: It starts, has requests that wait, or was woken by hand.
        sleep: It was sent to sleep by hand.
        pin: Whether nobody may displace it; None: as the record has it.
        intent_s: When its intent was written, and until when it was promised to serve; None: it has none.
    """

    entry: Entry
    total_bytes: int
    state: ModelState = ModelState.ASLEEP
    fingerprint: str = ""
    measured: bool = False
    starts: bool = False
    wants: bool = False
    sleep: bool = False
    pin: bool | None = None
    intent_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of a turn.

    Attributes:
        record: The record to write, if it differs from the one that was read.
        entry: The worker's own entry there.
        failed: Why its waiting requests fail; empty: they don't.
        stage: Whether to stage the weights.
        check_at_s: When to look again although nothing has changed; infinite: never.
    """

    record: Record
    entry: Entry
    failed: str
    stage: bool
    check_at_s: float


def refusal(record: Record, own: Own) -> str:
    """Returns why a worker that is not in the record yet can't join it; empty: it can."""
    others = [one for one in record.entries if one.owner != own.entry.owner]
    if others and record.total_bytes != own.total_bytes:
        return (
            f"--device-memory is {own.total_bytes} bytes here, and {record.total_bytes} for the other workers of this "
            f"machine ({', '.join(one.id for one in others)}): it must be the same for all"
        )
    for one in others:
        if one.model == own.entry.model and one.role != own.entry.role:
            return (
                f"{one.id} is a {one.role} worker of this model on this machine: on a shared device both roles of one "
                "model would take its memory twice; start only one of them"
            )
    return ""


def turn(record: Record, activities: Activities, own: Own, policy: ResidencyPolicy, now: float) -> Turn:
    """Takes a worker's turn.

    Args:
        record: As it was read, without the processes that are proved gone.
        activities: The last ones of all workers, its own from just now.
    """
    mine = record.of(own.entry.owner)
    worker = own.entry.id if mine is None else mine.id
    record = _brought_up(record, activities, own, worker, now)
    failed, stage, check_at_s = "", False, record.settles_at_s
    while now >= record.settles_at_s:
        decision = policy.decide(snapshot(record, activities, now), now)
        check_at_s = decision.check_at_s
        before, asleep = record, record.get(worker).state is ModelState.ASLEEP
        for action in decision.actions:
            match action:
                case Fail(model=name, reason=reason) if name == worker and asleep:
                    record, failed = unwanted(record, worker), reason
                case Stage(model=name) if name == worker:
                    stage = True
                case _:
                    record = _carried_out(record, own, worker, action, now)
        if record == before:
            break
    return Turn(record, record.get(worker), failed, stage, check_at_s)


def _carried_out(record: Record, own: Own, worker: str, action: Action, now: float) -> Record:
    match action:
        case Drain(model=victim, needed_by=needed_by):
            return drained(record, victim, needed_by, now)
        case Wake(model=name) if name == worker and own.state is ModelState.ASLEEP:
            return woken(record, worker, now)
        case Sleep(model=name) if name == worker and own.state.has_memory:
            return entered(record, worker, ModelState.SLEEPING, now)
    return record


def _brought_up(record: Record, activities: Activities, own: Own, worker: str, now: float) -> Record:
    """Brings the record up to what the worker knows about itself."""
    record = _described(record, own, worker, now)
    record = _in_state(record, own, worker, now)
    if own.pin is not None:
        record = pinned(record, worker, own.pin)
    if own.sleep:
        record = drained(record, worker, "", now)
    entry = record.get(worker)
    if entry.state is ModelState.DRAINING and entry.needed_by and all(one.worker == worker for one in record.intents):
        return serves(record, worker, now)  # nobody needs the memory any more
    if entry.state in (ModelState.WAKING, ModelState.SERVING):
        return record
    if not own.wants:
        return unwanted(record, worker)
    return wanted(record, worker, activities, now, *(own.intent_s or ()))


def _described(record: Record, own: Own, worker: str, now: float) -> Record:
    """Adds the worker, or brings its description up to date."""
    memory_bytes = own.entry.memory_bytes
    if own.measured:
        record = measured(record, own.fingerprint, memory_bytes)
    else:
        memory_bytes = record.measured.get(own.fingerprint, memory_bytes)
    if record.of(own.entry.owner) is None:
        if not record.entries:
            record = replace(record, total_bytes=own.total_bytes)
        return joined(record, replace(own.entry, memory_bytes=memory_bytes, since_s=now))
    before = record.get(worker)
    # While it has its memory, it reserves more only if that is free.
    holds = ModelState.ASLEEP not in (before.state, own.state)
    if holds and not (own.measured and fits(record, before, memory_bytes)):
        memory_bytes = before.memory_bytes
    described = replace(
        own.entry,
        id=worker,
        memory_bytes=memory_bytes,
        state=before.state,
        since_s=before.since_s,
        needed_by=before.needed_by,
    )
    return replace(record, entries=tuple(described if one.id == worker else one for one in record.entries))


def _in_state(record: Record, own: Own, worker: str, now: float) -> Record:
    """Brings the worker's state in the record in line with what it really is."""
    entry = record.get(worker)
    if not own.state.has_memory:
        # Otherwise it has gone to sleep, or a wake has failed; or the record was lost.
        return record if entry.state is own.state else entered(record, worker, own.state, now)
    if entry.state is ModelState.WAKING:
        if entry.memory_bytes < own.entry.memory_bytes and own.measured:
            # It takes more than was reserved for it, and more than is free: it wakes again when that much is.
            return entered(record, worker, ModelState.SLEEPING, now)
        # A start has no requests yet, and so loses nothing if it is displaced at once.
        return serves(record, worker, now - entry.min_runtime_s if own.starts else now)
    if entry.state in (ModelState.ASLEEP, ModelState.SLEEPING):  # lost: the record, or an answer
        return entered(record, worker, own.state, now)
    return record

"""When a worker's model sleeps and wakes, on a device that several workers share.

A worker without its model's memory is a paused worker: it keeps process, lease and sessions, takes requests, and lets
them wait. It looks at the device's record (`cpd/residency/record.py`) each second, more often while anybody on the
device waits or changes its state, and at once when its own situation changes. At each look it takes its turn
(`cpd/residency/turn.py` says what may follow), and acts on it if it could be written. A wake that fails is tried once
more, before the requests that wait fail.

The first wake is the start of the worker (`take_turn`, `begin`). While Redis is away nobody sleeps or wakes, and those
that drain take requests again. Whoever sees that a worker's process has ended removes what it had reserved.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from cpd.common.errors import ConfigError, CPDError
from cpd.common.process_identity import ProcessIdentity
from cpd.common.redis_client import RedisError
from cpd.residency.allocation import never_fits
from cpd.residency.ledger import Ledger, Look, pause_s
from cpd.residency.record import (
    MOST_DEADLINES,
    MOST_S,
    SETTLE_S,
    Activity,
    Owner,
    Record,
    drops_staged,
    unwanted,
    without,
)
from cpd.residency.snapshot import ModelState, ResidencyPolicy
from cpd.residency.turn import Own, Turn, refusal, turn
from cpd.rpc import cpd_pb2 as pb
from worker.resident import Resident

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks while nothing happens on the device."""

BUSY_LOOK_S = 0.1
"""The same while somebody waits, loads, drains or goes to sleep."""

AGAIN_S = 1.0
"""A wake that fails is tried once more after this time. Only then its requests fail, parked streams among them."""

REST_S = 30.0
"""After that, requests fail at once for this time: a model that can't be loaded must not displace others again and
again. `cpd wake` ends it."""

_LEAST_LOOK_S = 0.01
_MOST_ATTEMPTS = 20
_OVERDUE_S = 0.1
"""What a load report says if the promised time is over."""

_TO_WIRE: Mapping[ModelState, pb.Residency.State.ValueType] = {
    ModelState.ASLEEP: pb.Residency.STATE_ASLEEP,
    ModelState.WAKING: pb.Residency.STATE_WAKING,
    ModelState.SERVING: pb.Residency.STATE_SERVING,
    ModelState.DRAINING: pb.Residency.STATE_DRAINING,
    ModelState.SLEEPING: pb.Residency.STATE_DRAINING,
}


class Residency:
    """One worker's part. Runs on the event loop.

    Args:
        own: The worker as it starts; its memory is an estimate.
        staging_bytes: Budget of the machine for staged weights.
        fail: Called with a sentence, with which the requests that wait must fail, and the time in seconds after which
            they may be tried again; 0: that is not known.
        changed: Called when the load report changes.
        on_failure: Called if this fails, which no error of Redis or of a wake does.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: ResidencyPolicy,
        own: Own,
        *,
        staging_bytes: int = 0,
        fail: Callable[[str, float], None],
        changed: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._own = replace(own, starts=True)
        self._staging_bytes = staging_bytes
        self._fail, self._changed, self._on_failure = fail, changed, on_failure
        self._process = ProcessIdentity.own()
        self._resident: Resident | None = None
        self._loop = asyncio.get_running_loop()
        self._redis_ahead_s: float | None = None  # of time.monotonic
        self._state = ModelState.ASLEEP  # in the record
        self._asked = False  # to wake, by hand or by a request that was given up
        self._given_up = ""  # why those that waited failed
        self._rests_until_s = 0.0
        self._waiting = 0
        self._wakes, self._waited_s = 0, 0.0
        self._took_s: dict[str, float] = {}  # by part; see `Residency.took_s` in proto/cpd.proto
        self._since_s = 0.0  # of `_state`
        self._stages, self._stage_due = staging_bytes > 0, False
        self._dropped_for: tuple[float, float] | None = None  # the intent during which staged weights were dropped
        self._away = False
        self._told_holders = ""
        self._look_now = asyncio.Event()
        self._closing = self._closed = False
        self._my_turn: asyncio.Future[None] = self._loop.create_future()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._loading_since_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None  # a wake or a sleep
        self._staging: asyncio.Task[None] | None = None

    # ---- the start ----

    async def take_turn(self) -> None:
        """Waits until this worker may load its model. It must call `begin` then, or end.

        Raises:
            ConfigError: It can't be on this device; the message says why.
        """
        self._looking = self._start_task(self._keep_looking(), "residency")
        await self._my_turn

    async def begin(self, resident: Resident, memory_bytes: int) -> None:
        """The model is loaded and its requests can be answered; returns when the record says so.

        Args:
            resident: The loaded model.
            memory_bytes: What it takes.

        Raises:
            ConfigError: It takes more than there is.
        """
        self._resident = resident
        entry = replace(self._own.entry, memory_bytes=memory_bytes, wake_s=time.monotonic() - self._loading_since_s)
        self._own = replace(self._own, state=ModelState.SERVING, entry=entry, measured=True)
        self._stage_due = True
        self._look_now.set()
        await self._begun

    async def close(self) -> None:
        """Stops, if it has not. What this process holds stays reserved until it has ended."""
        if self._closed:
            return
        self._closing = self._closed = True
        self._look_now.set()
        for task in (self._looking, self._working, self._staging):
            if task is not None and not task.done():
                # Cancelling alone is not enough: the Redis client's own timeouts can swallow it.
                if task is self._looking:
                    await asyncio.wait([task], timeout=0.3)
                task.cancel()
                await asyncio.wait([task], timeout=0.1)
        with contextlib.suppress(RedisError, OSError, CPDError):
            await self._ledger.change(self._left)

    def _left(self, look: Look) -> Record | None:
        own = self._own
        if look.record is None or (mine := look.record.of(own.entry.owner)) is None:
            return None
        if own.state is ModelState.ASLEEP and not own.entry.held_bytes:
            return without(look.record, [own.entry.owner])
        return unwanted(look.record, mine.id)

    # ---- for the worker ----

    def request_arrived(self) -> None:
        """A request has arrived, and may have to wait."""
        if time.monotonic() >= self._rests_until_s:
            self._given_up = ""
        if self._state is not ModelState.SERVING and self._own.intent_s is None:
            self._look_now.set()

    def request_given_up(self) -> None:
        """A request has waited too long. If it waited for a wake, the wake goes on, so that the next try is served.

        Otherwise each try would begin its wait anew, and requests that may not wait long would never be served.
        """
        if self._own.intent_s is not None:
            self._asked = True

    def wake(self) -> None:
        """Wakes the model as a request would."""
        self._asked, self._given_up, self._rests_until_s = True, "", 0.0
        self._own = replace(self._own, sleep=False)
        self._look_now.set()

    def sleep(self) -> None:
        """Lets the model drain, and sleep. It wakes again when there are requests, also those that were parked."""
        self._asked = False
        self._own = replace(self._own, sleep=True)
        self._look_now.set()

    def pin(self, pinned: bool) -> None:
        """Says whether other models may displace this one."""
        self._own = replace(self._own, pin=pinned)
        self._look_now.set()

    @property
    def state(self) -> ModelState:
        """The state that the worker's load reports tell."""
        return ModelState.WAKING if self._resident is None else self._resident.state

    def report(self) -> pb.Residency:
        """Returns the part of a load report."""
        state = self.state
        report = pb.Residency(
            state=_TO_WIRE[state],
            pinned=bool(self._own.pin),
            wakes=self._wakes,
            waited_s=self._waited_s,
            cas_conflicts=self._ledger.conflicts,
            took_s=self._took_s,
        )
        if self._own.intent_s is not None and state is not ModelState.SERVING:
            report.serves_in_s = max(_OVERDUE_S, self._own.intent_s[1] - self._now())
        return report

    # ---- looks ----

    def _now(self) -> float:
        """Redis's time, as far as known."""
        return time.monotonic() + (self._redis_ahead_s or 0.0)

    async def _keep_looking(self) -> None:
        while not self._closing:
            self._look_now.clear()
            try:
                pause = await self._look()
                if self._away:
                    log.info("Redis answers again")
                self._away = False
            except (RedisError, OSError) as error:
                pause = LOOK_S
                self._redis_is_away(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()

    def _redis_is_away(self, error: Exception) -> None:
        if not self._away:
            log.warning("Redis does not answer, so no model sleeps or wakes: %s", error)
        self._away = True
        if self._own.state is ModelState.DRAINING:
            self._drain(False)

    async def _look(self) -> float:
        """Takes a turn and acts on it; returns when to look again, in seconds."""
        for attempt in range(_MOST_ATTEMPTS):
            activity = self._activity()
            if self._given_up and self._waiting:
                self._fail_waiting()
            look = await self._ledger.look(self._own.entry.owner.key, activity)
            self._redis_ahead_s = look.now - time.monotonic()
            record, gone = self._without_gone(look)
            if record.of(self._own.entry.owner) is None and (reason := self._refusal(record)):
                self._refuse(self._my_turn, reason)
                return LOOK_S
            own = replace(self._own, wants=self._wants())
            taken = turn(record, look.activities, own, self._policy, look.now)
            if taken.record == look.record or await self._ledger.write(look, taken.record):
                for one in gone:
                    log.info("%s is gone: what it had reserved is free", one)
                self._act(look, taken, activity)
                return self._pause_s(look, taken)
            await asyncio.sleep(pause_s(attempt))
        return BUSY_LOOK_S

    def _refusal(self, record: Record) -> str:
        return "" if self._my_turn.done() else refusal(record, self._own)

    def _refuse(self, start: "asyncio.Future[None]", reason: str) -> None:
        """The start fails, and this process ends."""
        self._closing = True
        if not start.done():
            start.set_exception(ConfigError(reason))

    def _without_gone(self, look: Look) -> tuple[Record, list[str]]:
        """Returns the record without the processes that are proved gone, and their names."""
        record = look.record
        if record is None:
            lost = Record(self._own.total_bytes, look.now + SETTLE_S)
            return lost, []
        gone = {one.owner: one.id for one in record.entries if self._is_gone(one.owner)}
        return without(record, gone.keys()), list(gone.values())

    def _is_gone(self, owner: Owner) -> bool:
        return owner != self._own.entry.owner and owner.is_gone(self._process)

    def _activity(self) -> Activity:
        ahead_s = self._redis_ahead_s
        if self._resident is None or ahead_s is None:
            return Activity()
        facts = self._resident.facts(time.monotonic())
        self._waiting = facts.waiting
        if facts.staged_bytes > self._staging_bytes:
            self._stages = False
        if not facts.waiting and time.monotonic() >= self._rests_until_s:
            self._given_up = ""
        deadlines = sorted(_bounded(one + ahead_s) for one in facts.deadlines if isfinite(one))
        return Activity(
            waiting=facts.waiting,
            running=facts.running,
            resumed=facts.resumed,
            deadlines=tuple(deadlines[:MOST_DEADLINES]),
            drain_s=_bounded(facts.drain_s),
            arrivals_per_s=_bounded(facts.arrivals_per_s),
            last_access_s=_bounded(facts.last_access + ahead_s),
            staged_bytes=facts.staged_bytes,
        )

    def _wants(self) -> bool:
        return self._own.starts or self._asked or (self._waiting > 0 and not self._given_up)

    def _pause_s(self, look: Look, taken: Turn) -> float:
        record = taken.record
        busy = (
            record.intents
            or record.settles_at_s > look.now
            or any(one.state not in (ModelState.ASLEEP, ModelState.SERVING) for one in record.entries)
        )
        return max(_LEAST_LOOK_S, min(BUSY_LOOK_S if busy else LOOK_S, taken.check_at_s - look.now))

    # ---- what follows from a turn ----

    def _act(self, look: Look, taken: Turn, activity: Activity) -> None:
        entry, own, before = taken.entry, self._own, self.report()
        intent = taken.record.intent_of(entry.id)
        if entry.state is ModelState.SERVING and own.intent_s is not None:
            self._waited_s += max(0.0, look.now - own.intent_s[0])
        if entry.state is ModelState.WAKING and self._state is ModelState.ASLEEP and own.intent_s is not None:
            self._took("lock", entry.since_s - own.intent_s[0])
        if entry.state is ModelState.SLEEPING and self._state is ModelState.DRAINING:
            self._took("drain", entry.since_s - self._since_s)
        self._state, self._since_s = entry.state, entry.since_s
        self._own = own = replace(
            own,
            intent_s=None if intent is None else (intent.since_s, intent.latest_s),
            pin=entry.id in taken.record.pins if own.pin is None else own.pin,
            sleep=own.sleep and entry.state in (ModelState.WAKING, ModelState.SERVING),
        )
        if entry.state is ModelState.SERVING:
            self._asked = False
        if taken.failed:
            self._given_up_because(taken.failed)
        if not self._my_turn.done() and entry.state is ModelState.ASLEEP:
            self._tell_who_holds(taken.record)
        if entry.state is ModelState.WAKING and own.state is ModelState.ASLEEP:
            self._own = replace(self._own, state=ModelState.WAKING)
            self._load()
        elif entry.state is ModelState.SLEEPING and own.state.has_memory and self._resident is not None:
            self._free(self._resident)
        elif own.state.has_memory:
            self._drain(entry.state is ModelState.DRAINING)
        if own.starts and own.state.has_memory and entry.state is not ModelState.WAKING:
            self._own = replace(self._own, starts=False)
            if not self._begun.done():
                self._begun.set_result(None)
        self._stage(look, taken, activity)
        after = self.report()
        after.serves_in_s = before.serves_in_s if before.serves_in_s and after.serves_in_s else after.serves_in_s
        if after != before:
            self._changed()

    def _drain(self, drains: bool) -> None:
        """Lets requests wait or run, if that changes."""
        state = ModelState.DRAINING if drains else ModelState.SERVING
        if self._resident is not None and state is not self._own.state:
            self._own = replace(self._own, state=state)
            (self._resident.drain if drains else self._resident.undrain)()

    def _tell_who_holds(self, record: Record) -> None:
        holders = ", ".join(sorted(one.id for one in record.entries if one.state is not ModelState.ASLEEP))
        if holders and holders != self._told_holders:
            log.info("waiting for its turn to load; on the device: %s", holders)
        self._told_holders = holders

    def _given_up_because(self, reason: str) -> None:
        self._asked, self._given_up = False, reason
        if self._own.starts:
            self._refuse(self._my_turn, reason)
            return
        log.warning("requests that wait fail: %s", reason)
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        self._fail(self._given_up, max(0.0, self._rests_until_s - time.monotonic()))

    def _load(self) -> None:
        self._loading_since_s = time.monotonic()
        if self._resident is not None:
            self._working = self._start_task(self._wake(self._resident), "wake")
        elif not self._my_turn.done():
            self._my_turn.set_result(None)

    async def _wake(self, resident: Resident) -> None:
        await self._staging_done()
        try:
            try:
                await self._try_to_wake(resident)
            except CPDError as error:
                log.warning("the wake failed, and is tried once more: %s", error)
                await asyncio.sleep(AGAIN_S)
                await self._try_to_wake(resident)
        except CPDError as error:
            self._own = replace(self._own, state=ModelState.ASLEEP)
            self._rests_until_s = time.monotonic() + REST_S
            self._given_up_because(str(error))
        self._look_now.set()

    async def _try_to_wake(self, resident: Resident) -> None:
        began_s, staged = time.monotonic(), resident.facts(time.monotonic()).staged_bytes > 0
        memory_bytes = await resident.wake()
        took_s = time.monotonic() - began_s
        entry = replace(self._own.entry, memory_bytes=memory_bytes)
        entry = replace(entry, staged_wake_s=took_s) if staged else replace(entry, wake_s=took_s)
        self._own = replace(self._own, state=ModelState.SERVING, entry=entry, measured=True)
        self._wakes += 1
        self._took_all(resident)
        self._stage_due = True

    def _free(self, resident: Resident) -> None:
        own = self._own
        if own.starts and own.entry.memory_bytes > own.total_bytes:
            self._refuse(self._begun, never_fits(own.entry.id, own.entry.memory_bytes, own.total_bytes))
            return
        self._drain(True)
        self._own = replace(self._own, state=ModelState.SLEEPING)
        self._working = self._start_task(self._sleep(resident), "sleep")

    async def _sleep(self, resident: Resident) -> None:
        await self._staging_done()
        began_s = time.monotonic()
        try:
            held_bytes = await resident.sleep()
        except CPDError as error:
            log.error("the memory stays reserved until this process has ended, which it does: %s", error)
            return
        entry = self._own.entry
        entry = replace(entry, held_bytes=min(held_bytes, entry.memory_bytes), sleep_s=time.monotonic() - began_s)
        self._own = replace(self._own, state=ModelState.ASLEEP, entry=entry)
        self._took_all(resident)
        self._look_now.set()

    def _took_all(self, resident: Resident) -> None:
        for part, seconds in resident.took_s.items():
            self._took(part, seconds)

    def _took(self, part: str, seconds: float) -> None:
        self._took_s[part] = self._took_s.get(part, 0.0) + max(0.0, seconds)

    # ---- staged weights ----

    def _stage(self, look: Look, taken: Turn, activity: Activity) -> None:
        """Stages the weights once after each wake and when the policy says so, within the budget."""
        resident = self._resident
        if resident is None or (self._staging is not None and not self._staging.done()):
            return
        state = taken.entry.state
        if activity.staged_bytes:
            if state is not ModelState.WAKING and drops_staged(
                taken.record, look.activities, taken.entry.id, self._staging_bytes, look.now
            ):
                log.info("drops its staged weights: --staging-memory is used up")
                resident.unstage()
                self._dropped_for = self._own.intent_s
            return
        # Dropped for others that wait, too, they are not staged again at once: that would drop theirs.
        ahead = taken.stage and state is ModelState.ASLEEP and self._own.intent_s != self._dropped_for
        due = (self._stage_due and state is ModelState.SERVING) or ahead
        if due and self._stages:
            self._stage_due = False
            self._staging = self._start_task(self._stage_now(resident), "stage")

    async def _stage_now(self, resident: Resident) -> None:
        try:
            await resident.stage()
        except CPDError as error:
            self._stages = False
            log.warning("the weights can't be staged: %s", error)
        self._look_now.set()

    async def _staging_done(self) -> None:
        if self._staging is not None:
            await asyncio.wait([self._staging])

    # ---- tasks ----

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the worker's part in sharing the device failed", exc_info=error)
            self._on_failure(error)


def _bounded(value: float) -> float:
    """Returns a number that fits into an `Activity`."""
    return min(max(value, 0.0), MOST_S)

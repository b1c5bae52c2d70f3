"""An engine for the event loop: it steps on its own thread, and the loop sends it commands and gets its results.

A *pass* runs the queued commands, then one engine step if there is work, then the callback `after_pass`. Without
commands and work there are no passes. Who runs what:

    engine thread                                   event loop
    builds the engine, runs commands                `call`, `poll`, `post` queue commands
    steps while there is work                       gets the results of a pass, in order: command results before the
    runs `after_pass` and retries polls               step; then `after_pass`'s deliveries, the Update, the stats

Results are handed over when the engine is about to wait for the device, which may be in the next pass: meanwhile the
event loop has the interpreter. Each pass wakes the event loop at most three times, however many requests there are,
and not at all while an earlier wake-up is still pending.

An exception in a step, `after_pass` or a posted command means that the engine can no longer be trusted: it is logged,
`on_failure` is called, and later calls raise EngineDiedError. An exception in a `call` or `poll` goes to its caller.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cpd.common.blocks import Tier
from cpd.common.errors import CPDError
from engine.engine import Engine
from engine.types import CacheEvent, EngineStats, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
AfterPass = Callable[[Engine, StepOutput | None], None]
Listener = Callable[["Update"], None]

STATS_INTERVAL_S = 0.1
IDLE_CHECK_S = 0.5
"""The engine's page accounts are checked after this long without work."""
CHECK_INTERVAL_S = 10.0
"""Shortest time between two checks: one takes 10 ms with 50,000 cached pages."""


class EngineDiedError(CPDError):
    """The engine failed or was closed."""


class Update(NamedTuple):
    """The results of one pass, or the engine's statistics after it.

    Attributes:
        output: The step's tokens; None if there was no step.
        events: Cache events of the pass; None if there were none.
        number: The events' number, counted from 1 without gaps.
        stats: Sent in an Update of their own, at most every STATS_INTERVAL_S while busy, and always when work ends.
    """

    output: StepOutput | None
    events: list[CacheEvent] | None
    number: int
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The cached blocks after event `number`, by tier."""

    number: int
    hashes: dict[Tier, list[bytes]]


class Command(NamedTuple):
    """A command for the next pass, and the future that waits for it."""

    run: Callable[[Engine], object]
    waiter: asyncio.Future[Any] | None

    def refuse(self) -> None:
        """Fails the command: there is no next pass."""
        if self.waiter is not None:
            _fail(self.waiter, EngineDiedError("the engine has stopped"))


@dataclass(frozen=True, slots=True)
class _Poll:
    attempt: Callable[[Engine], bool]
    waiter: asyncio.Future[Any]


class AsyncEngine(ABC):
    """An Engine and its passes. Subclasses decide where passes run.

    Attributes:
        pass_number: Number of the pass under way; 0 between passes. Any thread may read it.

    Args:
        build: Builds the engine.
        on_failure: Called on the event loop when the engine failed.
    """

    def __init__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> None:
        self.pass_number = 0
        self._build = build
        self._on_failure = on_failure
        self._after_pass: AfterPass = lambda engine, output: None
        self._listeners: tuple[Listener, ...] = ()
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Command] = deque()
        # Only passes use what follows.
        self._deliveries: list[Callable[[], None]] = []
        self._polls: list[_Poll] = []
        self._polled_version = -1
        self._number = 0
        self._stats_at = 0.0
        self._checked_at = -CHECK_INTERVAL_S
        self._checked = True  # idle and checked

    @abstractmethod
    async def start(self) -> Engine:
        """Builds the engine and starts stepping.

        Returns:
            The engine. Only its immutable attributes may be read; use `call` for anything else.

        Raises:
            Exception: Whatever `build` raised.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stops after the current pass; queued calls raise EngineDiedError."""

    def attach(self, after_pass: AfterPass, *listeners: Listener) -> None:
        """Sets the receivers of results. Call it before there is any work.

        Args:
            after_pass: Runs where the engine runs, at the end of every pass, while the pages of `StepOutput.computed`
                are still held.
            listeners: Called on the event loop with each Update, in this order.
        """
        self._after_pass, self._listeners = after_pass, listeners

    def call(self, fn: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queues `fn` for the next pass; the future gets its result or exception.

        Calls and posts run in the order in which they were queued. Cancelling the future does not undo the call.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue(Command(lambda engine: self._resolve(future, fn, engine), future))
        return future

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Queues `fn` for the next pass. There is no result: an exception in it is the engine's failure."""
        self._queue(Command(fn, None))

    def poll(self, fn: Callable[[Engine], T | None]) -> asyncio.Future[T]:
        """Runs `fn` now and after each pass in which `Engine.version` changed, until it returns a value or raises.

        None means: try again. A poll cannot be withdrawn: let `fn` return a value when the result is no longer wanted,
        and call `nudge`.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def attempt(engine: Engine) -> bool:
            return self._resolve(future, fn, engine, final=False)

        def register(engine: Engine) -> None:
            if not attempt(engine):
                self._polls.append(_Poll(attempt, future))

        self._queue(Command(register, future))
        return future

    def nudge(self) -> None:
        """Retries polls in the next pass although the engine has not changed. Any thread may call it."""

        def forget_version(engine: Engine) -> None:
            self._polled_version = -1

        self.post(forget_version)

    def deliver(self, callback: Callable[[], None]) -> None:
        """Schedules `callback` on the event loop, before this pass's Update. Only for code that runs in a pass."""
        self._deliveries.append(callback)

    async def snapshot(self) -> CacheSnapshot:
        """Returns all cached blocks, and the number of the last event that they include."""

        def take(engine: Engine) -> CacheSnapshot:
            self._report(engine, None)
            return CacheSnapshot(self._number, {tier: engine.cached_hashes(tier) for tier in (Tier.PAGES, Tier.HOST)})

        return await self.call(take)

    # ---- for subclasses ----

    @abstractmethod
    def _queue(self, command: Command) -> None:
        """Queues `command` for the next pass, or refuses it if there will be none."""

    @abstractmethod
    def _flush(self) -> None:
        """Hands `_deliveries` to the event loop and empties the list."""

    def _hands_over_later(self, engine: Engine) -> bool:
        """True if the results of a pass are handed over in the next one."""
        return False

    def _run_commands(self, engine: Engine) -> None:
        """Begins a pass."""
        self._checked = False
        # Commands that arrive meanwhile wait for the next pass, so that the engine keeps stepping.
        for _ in range(len(self._commands)):
            self._commands.popleft().run(engine)

    def _end_pass(self, engine: Engine, output: StepOutput | None, now: float) -> None:
        """Ends a pass. The step's `output` is handed over before statistics are taken."""
        self._after_pass(engine, output)
        if self._polls and (version := engine.version) != self._polled_version:
            self._polled_version = version
            self._polls = [poll for poll in self._polls if not poll.attempt(engine)]
        self._report(engine, output)
        if not self._hands_over_later(engine):
            self._flush()
        if now - self._stats_at >= STATS_INTERVAL_S or not engine.has_work:
            self._stats_at = now
            self._tell_stats(engine, now)

    def _tell_stats(self, engine: Engine, now: float) -> None:
        self._deliver_update(Update(None, None, self._number, engine.stats(now)))
        self._flush()

    def _idle_check_in_s(self, now: float) -> float:
        """Returns how long to stay idle before `_check_when_idle`."""
        return max(IDLE_CHECK_S, self._checked_at + CHECK_INTERVAL_S - now)

    def _check_when_idle(self, engine: Engine, now: float) -> None:
        """Checks the page accounts once per idle time."""
        if not self._checked:
            engine.check_integrity()
            self._checked, self._checked_at = True, now

    def _fail_waiters(self) -> None:
        """Fails every queued command and poll: there are no more passes."""
        waiting = [*self._commands, *(Command(poll.attempt, poll.waiter) for poll in self._polls)]
        self._commands.clear()
        self._polls.clear()
        for command in waiting:
            self.deliver(command.refuse)

    def _handle(self, delivery: Callable[[], None]) -> None:
        """Runs a delivery on the event loop."""
        try:
            delivery()
        except Exception as error:
            log.critical("an engine result could not be handled", exc_info=True)
            self._on_failure(error)

    def _resolve(
        self, future: asyncio.Future[T], fn: Callable[[Engine], T | None], engine: Engine, *, final: bool = True
    ) -> bool:
        """Runs `fn` and delivers its result; unless `final`, None is no result. Returns whether it delivered one."""
        try:
            result = fn(engine)
        except Exception as error:
            failure = error
            if isinstance(error, CPDError):
                # expected, such as a full queue; the traceback's frames refer to the future, which refers to the error:
                # only a garbage collection would free the request
                error.__traceback__ = None
            self.deliver(lambda: _fail(future, failure))
            return True
        if result is not None or final:
            self.deliver(lambda: _set(future, result))
            return True
        return False

    def _report(self, engine: Engine, output: StepOutput | None) -> None:
        """Delivers an Update if the pass had any result."""
        events = engine.take_cache_events() or None
        if events:
            self._number += 1
        if output is not None or events is not None:
            self._deliver_update(Update(output, events, self._number, None))

    def _deliver_update(self, update: Update) -> None:
        def deliver() -> None:
            for listener in self._listeners:
                listener(update)

        self.deliver(deliver)


class EngineThread(AsyncEngine):
    """An AsyncEngine whose passes run on a thread of its own.

    Without commands and work the thread sleeps; the prefill lane and the host tier wake it, too.
    """

    def __init__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__(build, on_failure=on_failure)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._started: asyncio.Future[Engine] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._wakeup = threading.Condition()
        # Guarded by _wakeup, like the commands: the event loop, the prefill lane and the host tier change them.
        self._engine_woke = False
        self._passes = 0
        self._closing = False
        self._dead = False
        # From the engine thread to the event loop, and whether the loop was already woken for them.
        self._handed_over: deque[Callable[[], None]] = deque()
        self._announced = False

    async def start(self) -> Engine:
        self._thread.start()
        return await self._started

    async def close(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            await asyncio.shield(self._ended)

    # ---- event loop ----

    def _queue(self, command: Command) -> None:
        with self._wakeup:
            if not (self._dead or self._closing):
                self._commands.append(command)
                self._wakeup.notify()
                return
        command.refuse()

    def _receive(self) -> None:
        self._announced = False  # first, so that deliveries from now on wake the loop again
        for _ in range(len(self._handed_over)):
            self._handle(self._handed_over.popleft())

    # ---- engine thread ----

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            failure = error
            self._send(lambda: _fail(self._started, failure))
            self._end()
            return
        engine.set_work_callback(self._wake)
        engine.in_flight.before_wait = self._flush
        self._send(lambda: _set(self._started, engine))
        try:
            while self._wait_for_work(engine):
                self._pass(engine)
        except BaseException as error:
            log.critical("the engine failed", exc_info=True)
            failure = error
            self._flush()
            self._send(lambda: self._on_failure(failure))
        finally:
            self._end()

    def _wait_for_work(self, engine: Engine) -> bool:
        """Returns True when there is something to do, False when the thread must end."""
        while not engine.has_work:
            with self._wakeup:
                if not (self._commands or self._engine_woke or self._closing):
                    self._wakeup.wait(None if self._checked else self._idle_check_in_s(time.monotonic()))
                if self._commands or self._closing:
                    break
                woke, self._engine_woke = self._engine_woke, False
            if not woke:
                self._check_when_idle(engine, time.monotonic())
        return not self._closing

    def _wake(self) -> None:
        """Called by the prefill lane or the host tier, on any thread, when it has finished something."""
        with self._wakeup:
            self._engine_woke = True
            self._wakeup.notify()

    def _pass(self, engine: Engine) -> None:
        self._passes += 1
        self.pass_number = self._passes
        self._run_commands(engine)
        output = engine.step(time.monotonic()) if engine.has_work else None
        self._end_pass(engine, output, time.monotonic())
        self.pass_number = 0

    def _hands_over_later(self, engine: Engine) -> bool:
        return engine.has_work  # and will flush before it waits for the device

    def _flush(self) -> None:
        if self._deliveries:
            self._handed_over.extend(self._deliveries)
            self._deliveries.clear()
            if not self._announced:
                self._announced = True
                self._send(self._receive)

    def _send(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the event loop is closed: a result of the engine is dropped")

    def _end(self) -> None:
        with self._wakeup:
            self._dead = True
        self._fail_waiters()
        self.deliver(lambda: _set(self._ended, None))
        self._flush()


def _set(future: asyncio.Future[Any], result: object) -> None:
    """Sets a result unless the future is done, for example cancelled."""
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Sets an exception unless the future is done."""
    if not future.done():
        future.set_exception(error)

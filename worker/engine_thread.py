"""The engine's own thread, and the bridge between it and the event loop.

Who runs what:

    engine thread                                   event loop
    builds the engine, runs commands                `call`, `poll`, `post` queue commands
    steps while there is work                       gets what a pass brought, in order:
    runs the hook and the polls after every pass      command results, then the hook's deliveries, then the Update

A *pass* is: run the queued commands, step once if there is work. The results of its commands are handed over before
its step, everything else after it: at most two `call_soon_threadsafe` a pass, however many requests there are, and none
while the event loop has not come to what was handed over before. Without
commands and work the thread sleeps until there are some; the prefill lane's end wakes it, too.

An exception in a step, a hook or a posted command means that the engine can't be trusted any more: it is logged,
`on_failure` is told, and every later call raises EngineDiedError. An exception in a `call` or a `poll` is its caller's.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cpd.errors import CPDError
from engine.engine import Engine
from engine.types import CacheEvent, EngineStats, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
Hook = Callable[[Engine, StepOutput | None], None]

STATS_INTERVAL_S = 0.1
IDLE_CHECK_S = 0.5
"""The engine's page accounts are checked when there was nothing to do for this long."""


class EngineDiedError(CPDError):
    """The engine failed or was closed; nothing can be asked of it any more."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one pass brought.

    Attributes:
        output: The step's tokens; None when there was no step.
        events: Cache events of the pass, None when there were none.
        number: The events' number; they are counted from 1 without gaps.
        stats: Not with every pass: at most every STATS_INTERVAL_S while busy, and always when work ends.
    """

    output: StepOutput | None
    events: list[CacheEvent] | None
    number: int
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The findable blocks after event `number`."""

    number: int
    hashes: list[bytes]


class EngineThread:
    """Owns an Engine.

    Args:
        build: Makes the engine, on the engine thread.
        on_failure: Called on the event loop when the engine failed.
    """

    def __init__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> None:
        self._build = build
        self._on_failure = on_failure
        self._hook: Hook = lambda engine, output: None
        self._on_update: Callable[[Update], None] = lambda update: None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._started: asyncio.Future[Engine] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._wakeup = threading.Condition()
        # Shared with the event loop and the prefill lane, which change them under _wakeup.
        self._commands: deque[_Command] = deque()
        self._lane_done = False
        self._closing = False
        self._dead = False
        # From the engine thread to the event loop, and whether the loop knows that there is something.
        self._handed_over: deque[Callable[[], None]] = deque()
        self._announced = False
        # The engine thread's own.
        self._deliveries: list[Callable[[], None]] = []
        self._polls: list[_Poll] = []
        self._number = 0
        self._stats_at = 0.0
        self._settled = True  # idle, checked, and the last stats are current

    async def start(self) -> Engine:
        """Builds the engine and starts stepping.

        Returns:
            The engine, whose immutable attributes may be read; anything else goes through `call`.

        Raises:
            Exception: Whatever `build` raised.
        """
        self._thread.start()
        return await asyncio.shield(self._started)

    def attach(self, hook: Hook, on_update: Callable[[Update], None]) -> None:
        """Says who wants to know; before there is any work.

        Args:
            hook: Runs on the engine thread after every pass, while the pages of `StepOutput.computed` are still held.
            on_update: Called on the event loop once a pass that brought something.
        """
        self._hook, self._on_update = hook, on_update

    def call(self, fn: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queues `fn` for the engine thread, at once; the future brings its result or exception.

        Calls and posts run in the order in which they were queued. Cancelling the future does not undo the call.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = fn(engine)
            except Exception as error:
                failure = error
                self.deliver(lambda: _fail(future, failure))
            else:
                self.deliver(lambda: _resolve(future, result))

        self._queue(run, future)
        return future

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Queues `fn` for the engine thread; nobody waits for it, so an exception in it is the engine's failure."""
        self._queue(fn, None)

    def poll(self, fn: Callable[[Engine], T | None]) -> asyncio.Future[T]:
        """Runs `fn` now and after every pass until it returns something else than None, or raises.

        There is no way to withdraw: let `fn` see that it is unwanted and return a value that says so; `nudge` makes
        a pass happen.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def attempt(engine: Engine) -> bool:
            try:
                result = fn(engine)
            except Exception as error:
                failure = error
                self.deliver(lambda: _fail(future, failure))
                return True
            if result is None:
                return False
            self.deliver(lambda: _resolve(future, result))
            return True

        def register(engine: Engine) -> None:
            if not attempt(engine):
                self._polls.append(_Poll(attempt, future))

        self._queue(register, future)
        return future

    def nudge(self) -> None:
        """Makes a pass happen, so that polls are tried again."""
        self.post(lambda engine: None)

    def deliver(self, callback: Callable[[], None]) -> None:
        """On the engine thread only: has `callback` run on the event loop, before this pass's Update."""
        self._deliveries.append(callback)

    async def snapshot(self) -> CacheSnapshot:
        """All findable blocks, and the number of the last event that they include."""

        def take(engine: Engine) -> CacheSnapshot:
            self._report(engine, None, None)
            return CacheSnapshot(self._number, engine.cached_hashes())

        return await self.call(take)

    async def close(self) -> None:
        """Ends the thread after its current pass; queued calls raise EngineDiedError."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            await asyncio.shield(self._ended)

    # ---- event loop side ----

    def _queue(self, run: Callable[[Engine], object], waiter: asyncio.Future[Any] | None) -> None:
        with self._wakeup:
            if not (self._dead or self._closing):
                self._commands.append(_Command(run, waiter))
                self._wakeup.notify()
                return
        if waiter is not None:
            waiter.set_exception(EngineDiedError("the engine has stopped"))

    def _receive(self) -> None:
        self._announced = False  # before looking: what comes from now on is announced anew
        for _ in range(len(self._handed_over)):
            try:
                self._handed_over.popleft()()
            except Exception as error:
                log.critical("what the engine brought could not be handled", exc_info=True)
                self._on_failure(error)

    # ---- engine thread side ----

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            failure = error
            self._send(lambda: _fail(self._started, failure))
            self._end()
            return
        engine.on_lane_done(self._wake)
        self._send(lambda: _resolve(self._started, engine))
        try:
            while self._wait_for_work(engine):
                self._pass(engine)
        except BaseException as error:
            log.critical("the engine failed", exc_info=True)
            failure = error
            self._send(lambda: self._on_failure(failure))
        finally:
            self._end()

    def _wait_for_work(self, engine: Engine) -> bool:
        """Returns when there is something to do (True) or the thread is to end (False)."""
        while not engine.has_work:
            with self._wakeup:
                if not (self._commands or self._lane_done or self._closing):
                    self._wakeup.wait(None if self._settled else IDLE_CHECK_S)
                if self._commands or self._closing:
                    break
                done, self._lane_done = self._lane_done, False
            if not done:
                self._settle(engine)
        return not self._closing

    def _wake(self) -> None:
        """The prefill lane is done (on whatever thread)."""
        with self._wakeup:
            self._lane_done = True
            self._wakeup.notify()

    def _settle(self, engine: Engine) -> None:
        if not self._settled:
            engine.check_integrity()
            self._report(engine, None, engine.stats())
            self._flush()
            self._settled = True

    def _pass(self, engine: Engine) -> None:
        self._settled = False
        # Commands that come meanwhile wait for the next pass; they must not keep the engine from stepping.
        for _ in range(len(self._commands)):
            self._commands.popleft().run(engine)
        output = None
        if engine.has_work:
            self._flush()
            output = engine.step(time.monotonic())
        self._hook(engine, output)
        self._polls = [poll for poll in self._polls if not poll.attempt(engine)]
        now = time.monotonic()
        stats = None
        if now - self._stats_at >= STATS_INTERVAL_S or not engine.has_work:
            stats, self._stats_at = engine.stats(), now
        self._report(engine, output, stats)
        self._flush()

    def _report(self, engine: Engine, output: StepOutput | None, stats: EngineStats | None) -> None:
        """Delivers an Update if there is anything in it."""
        events = engine.take_cache_events() or None
        if events:
            self._number += 1
        if output is not None or events is not None or stats is not None:
            update = Update(output, events, self._number, stats)
            self.deliver(lambda: self._on_update(update))

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
            log.debug("the event loop is closed; nobody is left to tell")

    def _end(self) -> None:
        with self._wakeup:
            self._dead = True
            waiters = [command.waiter for command in self._commands] + [poll.waiter for poll in self._polls]
            self._commands.clear()
        for waiter in waiters:
            if waiter is not None:
                self.deliver(_failer(waiter))
        self.deliver(lambda: _resolve(self._ended, None))
        self._flush()


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], object]
    waiter: asyncio.Future[Any] | None


@dataclass(frozen=True, slots=True)
class _Poll:
    attempt: Callable[[Engine], bool]
    waiter: asyncio.Future[Any]


def _failer(future: asyncio.Future[Any]) -> Callable[[], None]:
    return lambda: _fail(future, EngineDiedError("the engine has stopped"))


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

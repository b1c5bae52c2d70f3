"""The bridge between an engine, which steps on its own time, and the event loop.

A *pass* of the engine is: run the queued commands, step once if there is work. The event loop gets what passes bring,
in order: the results of a pass's commands before its step, everything else after it (what the hook delivers, then the
Update, then one with stats if they are due). Without commands and work there are no passes.

An exception in a step, a hook or a posted command means that the engine can't be trusted any more: it is logged,
`on_failure` is told, and every later call raises EngineDiedError. An exception in a `call` or a `poll` is its caller's.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cpd.common.blocks import Tier
from cpd.common.errors import CPDError
from engine.engine import Engine
from engine.types import CacheEvent, EngineStats, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
Hook = Callable[[Engine, StepOutput | None], None]

STATS_INTERVAL_S = 0.1
IDLE_CHECK_S = 0.5
"""The engine's page accounts are checked when there was nothing to do for this long."""
CHECK_INTERVAL_S = 10.0
"""But no sooner after the last time: it takes 10 ms where 50,000 pages are cached."""


class EngineDiedError(CPDError):
    """The engine failed or was closed; nothing can be asked of it any more."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one pass brought, or where the engine stands after it.

    Attributes:
        output: The step's tokens; None when there was no step.
        events: Cache events of the pass, None when there were none.
        number: The events' number; they are counted from 1 without gaps.
        stats: By themselves, at most every STATS_INTERVAL_S while busy, and always when work ends.
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


class EngineBridge(ABC):
    """Owns an Engine. What makes its passes happen is a subclass's.

    Attributes:
        passing: The number of the pass that is under way, as other threads than the one that makes it see it; 0: none.

    Args:
        build: Makes the engine.
        on_failure: Called on the event loop when the engine failed.
    """

    def __init__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> None:
        self.passing = 0
        self._build = build
        self._on_failure = on_failure
        self._hook: Hook = lambda engine, output: None
        self._on_update: Callable[[Update], None] = lambda update: None
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Command] = deque()
        # Of whoever makes the passes.
        self._deliveries: list[Callable[[], None]] = []
        self._polls: list[_Poll] = []
        self._number = 0
        self._stats_at = 0.0
        self._checked_at = -CHECK_INTERVAL_S
        self._settled = True  # idle and checked

    @abstractmethod
    async def start(self) -> Engine:
        """Builds the engine and starts stepping.

        Returns:
            The engine, whose immutable attributes may be read; anything else goes through `call`.

        Raises:
            Exception: Whatever `build` raised.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends after the current pass; queued calls raise EngineDiedError."""

    def attach(self, hook: Hook, on_update: Callable[[Update], None]) -> None:
        """Says who wants to know; before there is any work.

        Args:
            hook: Runs where the engine does, after every pass, while the pages of `StepOutput.computed` are still held.
            on_update: Called on the event loop once a pass that brought something.
        """
        self._hook, self._on_update = hook, on_update

    def call(self, fn: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queues `fn` for the next pass, at once; the future brings its result or exception.

        Calls and posts run in the order in which they were queued. Cancelling the future does not undo the call.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = fn(engine)
            except Exception as error:
                failure = error
                self.deliver(lambda: fail(future, failure))
            else:
                self.deliver(lambda: resolve(future, result))

        self._queue(Command(run, future))
        return future

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Queues `fn` for the next pass; nobody waits for it, so an exception in it is the engine's failure."""
        self._queue(Command(fn, None))

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
                self.deliver(lambda: fail(future, failure))
                return True
            if result is None:
                return False
            self.deliver(lambda: resolve(future, result))
            return True

        def register(engine: Engine) -> None:
            if not attempt(engine):
                self._polls.append(_Poll(attempt, future))

        self._queue(Command(register, future))
        return future

    def nudge(self) -> None:
        """Makes a pass happen, so that polls are tried again."""
        self.post(lambda engine: None)

    def deliver(self, callback: Callable[[], None]) -> None:
        """For what runs in a pass: has `callback` run on the event loop, before this pass's Update."""
        self._deliveries.append(callback)

    async def snapshot(self) -> CacheSnapshot:
        """All cached blocks, and the number of the last event that they include."""

        def take(engine: Engine) -> CacheSnapshot:
            self._report(engine, None)
            return CacheSnapshot(self._number, {tier: engine.cached_hashes(tier) for tier in (Tier.PAGES, Tier.HOST)})

        return await self.call(take)

    # ---- for subclasses ----

    @abstractmethod
    def _queue(self, command: "Command") -> None:
        """Has `command` run in the next pass; fails it where there will be none."""

    @abstractmethod
    def _flush(self) -> None:
        """Has the event loop run `_deliveries` soon, and empties them."""

    def _run_commands(self, engine: Engine) -> None:
        """A pass begins."""
        self._settled = False
        # Commands that come meanwhile wait for the next pass; they must not keep the engine from stepping.
        for _ in range(len(self._commands)):
            self._commands.popleft().run(engine)

    def _end_pass(self, engine: Engine, output: StepOutput | None, now: float) -> None:
        """A pass ends, `output` being what its step brought: that is handed over before anything is counted."""
        self._hook(engine, output)
        self._polls = [poll for poll in self._polls if not poll.attempt(engine)]
        self._report(engine, output)
        self._flush()
        if now - self._stats_at >= STATS_INTERVAL_S or not engine.has_work:
            self._stats_at = now
            self._tell_stats(engine, now)

    def _tell_stats(self, engine: Engine, now: float) -> None:
        self._deliver_update(Update(None, None, self._number, engine.stats(now)))
        self._flush()

    def _settles_in_s(self, now: float) -> float:
        """If there is nothing to do for so long, it is time to settle."""
        return max(IDLE_CHECK_S, self._checked_at + CHECK_INTERVAL_S - now)

    def _settle(self, engine: Engine, now: float) -> None:
        """There was nothing to do for a while."""
        if not self._settled:
            engine.check_integrity()
            self._settled, self._checked_at = True, now

    def _fail_waiters(self) -> None:
        """There are no more passes: nobody shall wait for one."""
        waiters = [command.waiter for command in self._commands] + [poll.waiter for poll in self._polls]
        self._commands.clear()
        self._polls.clear()
        for waiter in waiters:
            if waiter is not None:
                self.deliver(_failer(waiter))

    def _handle(self, delivery: Callable[[], None]) -> None:
        """Runs a delivery, on the event loop."""
        try:
            delivery()
        except Exception as error:
            log.critical("what the engine brought could not be handled", exc_info=True)
            self._on_failure(error)

    def _report(self, engine: Engine, output: StepOutput | None) -> None:
        """Delivers an Update if a pass brought something."""
        events = engine.take_cache_events() or None
        if events:
            self._number += 1
        if output is not None or events is not None:
            self._deliver_update(Update(output, events, self._number, None))

    def _deliver_update(self, update: Update) -> None:
        self.deliver(lambda: self._on_update(update))


@dataclass(frozen=True, slots=True)
class Command:
    """What is queued for a pass, and who waits for it."""

    run: Callable[[Engine], object]
    waiter: asyncio.Future[Any] | None

    def refuse(self) -> None:
        """There will be no pass for it."""
        if self.waiter is not None:
            self.waiter.set_exception(EngineDiedError("the engine has stopped"))


@dataclass(frozen=True, slots=True)
class _Poll:
    attempt: Callable[[Engine], bool]
    waiter: asyncio.Future[Any]


def _failer(future: asyncio.Future[Any]) -> Callable[[], None]:
    return lambda: fail(future, EngineDiedError("the engine has stopped"))


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Sets a result, unless nobody waits for it any more."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Sets an exception, unless nobody waits for it any more."""
    if not future.done():
        future.set_exception(error)

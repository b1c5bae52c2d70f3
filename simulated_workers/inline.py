"""An engine without a thread: its passes are callbacks of the event loop.

    idle ──command, or the prefill lane is done──▶ pass begins ──its step's time is over──▶ ends ──▶ idle, or the next

A step of a simulated device is computed at once, and says when it would have ended: until then nobody learns what it
brought, and commands wait. So many workers share one event loop, and none waits for another one's thread.

Where steps take no time, those that only decode are made together (`sim/device/fast_forward.py`), because nothing can
come between.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.engine import Engine
from engine.types import StepOutput
from sim.device.fast_forward import Choose, FastForward
from sim.device.runner import VirtualTime
from worker.engine_bridge import Command, EngineBridge

log = logging.getLogger(__name__)

LATE_S = 2e-3
"""The event loop's timers may be late by this much. What follows begins when it should have: delays don't add up."""

BURST_S = 1e-3
"""Steps that take no time follow each other for so long before the event loop's other work has its turn. After one that
brings first tokens it has: they shall not wait for the tokens after them."""

MOST_AT_ONCE = 256
"""Steps made together: a client that is gone, or the next request, waits no longer."""


class InlineEngine(EngineBridge):
    """See EngineBridge; passes are made on the event loop.

    Args:
        clock: Of the engine's runner. It shows the event loop's time.
        choose: What decode steps choose, if none takes any time; None: they take some.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        on_failure: Callable[[BaseException], None],
        clock: VirtualTime,
        choose: Choose | None = None,
    ) -> None:
        super().__init__(build, on_failure=on_failure)
        self._clock = clock
        self._choose = choose
        self._engine: Engine | None = None  # None before it was built and when it is dead
        self._next: asyncio.Handle | None = None  # what happens next: a pass begins or ends, or while idle a check
        self._passing = False
        self._due_s = 0.0  # when the pass that begins next should have begun

    async def start(self) -> Engine:
        self._engine = engine = self._build()
        return engine

    async def close(self) -> None:
        self._end()

    def _queue(self, command: Command) -> None:
        if self._engine is None:
            command.refuse()
            return
        self._commands.append(command)
        self._wake()

    def _flush(self) -> None:
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            self._handle(delivery)

    def _tell_stats(self, engine: Engine, now: float) -> None:
        self._loop.call_soon(self._tell_stats_now, engine, now)  # when what the pass brought has been sent

    def _tell_stats_now(self, engine: Engine, now: float) -> None:
        try:
            if self._engine is engine:
                super()._tell_stats(engine, now)
        except Exception as error:
            self._failed(error)

    def _wake(self) -> None:
        if not self._passing:
            self._passing = True
            self._due_s = self._loop.time()
            self._then(self._loop.call_soon(self._run))

    def _run(self) -> None:
        """Makes passes until one takes its time, or there is nothing to do, or it is other work's turn."""
        engine = self._engine
        assert engine is not None
        now = turn_s = self._loop.time()
        try:
            while now - turn_s <= BURST_S:
                output = self._begin_pass(engine, now)
                if self._due_s > now:
                    self._then(self._loop.call_at(self._due_s, self._finish, engine, output))
                    return
                self._end_pass(engine, output, now)
                if not (self._commands or engine.has_work):
                    self._rest(engine)
                    return
                if output is not None and any(one.cached_tokens is not None for one in output.outputs):
                    break
                now = self._loop.time()
        except Exception as error:
            self._failed(error)
            return
        self._then(self._loop.call_soon(self._run))

    def _begin_pass(self, engine: Engine, now: float) -> StepOutput | None:
        begin_s = self._clock.time_s = max(self._due_s, now - LATE_S)
        self._run_commands(engine)
        output = None
        if engine.has_work:
            self._flush()
            output = self._together(engine) or engine.step(begin_s)
        self._due_s = self._clock.time_s
        return output

    def _together(self, engine: Engine) -> StepOutput | None:
        """Makes steps that only decode and take no time; None where the next one is none of these."""
        steps = min(engine.uneventful_steps, MOST_AT_ONCE) if self._choose else 0
        if self._choose is None or steps < 2:
            return None
        return FastForward(engine, steps, self._choose).end([0.0] * steps)

    def _finish(self, engine: Engine, output: StepOutput | None) -> None:
        """A step's time is over."""
        try:
            self._end_pass(engine, output, self._loop.time())
        except Exception as error:
            self._failed(error)
            return
        if self._commands or engine.has_work:
            self._run()
        else:
            self._rest(engine)

    def _rest(self, engine: Engine) -> None:
        """Nothing is to be done until there is a command, or the prefill lane is done."""
        self._passing = False
        alarm_s = self._clock.alarm_s
        if alarm_s is None:
            self._then(self._loop.call_later(self._settles_in_s(self._loop.time()), self._check, engine))
        else:
            self._then(self._loop.call_at(alarm_s, self._wake))

    def _check(self, engine: Engine) -> None:
        try:
            self._settle(engine, self._loop.time())
        except Exception as error:
            self._failed(error)

    def _then(self, handle: asyncio.Handle) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = handle

    def _failed(self, error: Exception) -> None:
        log.critical("the engine failed", exc_info=error)
        self._on_failure(error)
        self._end()

    def _end(self) -> None:
        self._engine = None
        if self._next is not None:
            self._next.cancel()
        self._fail_waiters()
        self._flush()

"""An engine without a thread: its passes are callbacks of the event loop.

    idle ──command, or the prefill lane is done──▶ pass begins ──its step's time is over──▶ ends ──▶ idle, or the next

A step of a simulated device is computed at once, and says when it would have ended. Until then its results are held
back, and commands wait. So many workers share one event loop.

If steps take no time, steps that only decode are made at once (`sim/device/fast_forward.py`), because nothing can come
between them.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.engine import Engine
from engine.types import StepOutput
from sim.device.fast_forward import Choose, FastForward, possible_steps
from sim.device.runner import VirtualTime
from worker.async_engine import AsyncEngine, Command

log = logging.getLogger(__name__)

LATE_S = 2e-3
"""Up to this delay of the event loop's timers, the next pass begins at its due time, so that delays don't add up."""

BURST_S = 1e-3
"""Maximum time that steps which take no time keep the event loop from other work. A step with first tokens ends it, so
that these are sent at once."""

MAX_FAST_FORWARD = 256
"""Maximum number of steps made at once, for which an abort or a new request has to wait."""


class InlineEngine(AsyncEngine):
    """An AsyncEngine whose passes run on the event loop.

    Args:
        clock: The clock of the engine's runner. It shows the event loop's time.
        choose: Chooses the tokens of decode steps if no step takes any time; None if steps take time.
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
        self._engine: Engine | None = None  # None before `start`, and after the engine has failed or was closed
        self._next: asyncio.Handle | None = None  # the next callback: a pass begins or ends, or while idle a check
        self._passing = False
        self._due_s = 0.0  # when the next pass is due

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
        self._loop.call_soon(self._tell_stats_now, engine, now)  # after the results of the pass have been sent

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
            self._set_next(self._loop.call_soon(self._run))

    def _run(self) -> None:
        """Makes passes until one takes time, there is nothing to do, or other work must run."""
        engine = self._engine
        assert engine is not None
        now = began_s = self._loop.time()
        try:
            while now - began_s <= BURST_S:
                output = self._begin_pass(engine, now)
                if self._due_s > now:
                    self._set_next(self._loop.call_at(self._due_s, self._finish, engine, output))
                    return
                self._end_pass(engine, output, now)
                if not (self._commands or engine.has_work):
                    self._become_idle(engine)
                    return
                if output is not None and any(one.cached_tokens is not None for one in output.outputs):
                    break
                now = self._loop.time()
        except Exception as error:
            self._failed(error)
            return
        self._set_next(self._loop.call_soon(self._run))

    def _begin_pass(self, engine: Engine, now: float) -> StepOutput | None:
        begin_s = self._clock.time_s = max(self._due_s, now - LATE_S)
        self._run_commands(engine)
        output = None
        if engine.has_work:
            self._flush()
            output = self._fast_forward(engine) or engine.step(begin_s)
        self._due_s = self._clock.time_s
        return output

    def _fast_forward(self, engine: Engine) -> StepOutput | None:
        """Makes several decode steps at once. Returns None if that is not possible now."""
        steps = min(possible_steps(engine), MAX_FAST_FORWARD) if self._choose else 0
        if self._choose is None or steps < 2:
            return None
        return FastForward(engine, steps, self._choose).end([0.0] * steps)

    def _finish(self, engine: Engine, output: StepOutput | None) -> None:
        """Ends a pass whose step's time is over."""
        try:
            self._end_pass(engine, output, self._loop.time())
        except Exception as error:
            self._failed(error)
            return
        if self._commands or engine.has_work:
            self._run()
        else:
            self._become_idle(engine)

    def _become_idle(self, engine: Engine) -> None:
        """Waits for a command or the prefill lane. If nothing comes for a while, checks the engine's page accounts."""
        self._passing = False
        alarm_s = self._clock.alarm_s
        if alarm_s is None:
            self._set_next(self._loop.call_later(self._idle_check_in_s(self._loop.time()), self._check, engine))
        else:
            self._set_next(self._loop.call_at(alarm_s, self._wake))

    def _check(self, engine: Engine) -> None:
        try:
            self._check_when_idle(engine, self._loop.time())
        except Exception as error:
            self._failed(error)

    def _set_next(self, handle: asyncio.Handle) -> None:
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

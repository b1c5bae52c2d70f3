"""The engine's own thread.

Who runs what:

    engine thread                                   event loop
    builds the engine, runs commands                `call`, `poll`, `post` queue commands
    steps while there is work                       gets what a pass brought, in order:
    runs the hook and the polls after every pass      command results, then the hook's deliveries, then the Updates

There are at most three `call_soon_threadsafe` a pass, however many requests there are, and none while the event loop
has not come to what was handed over before. Without commands and work the thread sleeps until there are some; the
prefill lane and the host tier wake it, too.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.engine import Engine
from worker.engine_bridge import Command, EngineBridge, fail, resolve

log = logging.getLogger(__name__)


class EngineThread(EngineBridge):
    """See EngineBridge; passes are made by a thread of its own."""

    def __init__(self, build: Callable[[], Engine], *, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__(build, on_failure=on_failure)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._started: asyncio.Future[Engine] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._wakeup = threading.Condition()
        # Under _wakeup, like the commands: the event loop, the prefill lane and the host tier change them.
        self._engine_woke = False
        self._passes = 0
        self._closing = False
        self._dead = False
        # From the engine thread to the event loop, and whether the loop knows that there is something.
        self._handed_over: deque[Callable[[], None]] = deque()
        self._announced = False

    async def start(self) -> Engine:
        self._thread.start()
        return await asyncio.shield(self._started)

    async def close(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            await asyncio.shield(self._ended)

    # ---- event loop side ----

    def _queue(self, command: Command) -> None:
        with self._wakeup:
            if not (self._dead or self._closing):
                self._commands.append(command)
                self._wakeup.notify()
                return
        command.refuse()

    def _receive(self) -> None:
        self._announced = False  # before looking: what comes from now on is announced anew
        for _ in range(len(self._handed_over)):
            self._handle(self._handed_over.popleft())

    # ---- engine thread side ----

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            failure = error
            self._send(lambda: fail(self._started, failure))
            self._end()
            return
        engine.on_work(self._wake)
        self._send(lambda: resolve(self._started, engine))
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
                if not (self._commands or self._engine_woke or self._closing):
                    self._wakeup.wait(None if self._settled else self._settles_in_s(time.monotonic()))
                if self._commands or self._closing:
                    break
                done, self._engine_woke = self._engine_woke, False
            if not done:
                self._settle(engine, time.monotonic())
        return not self._closing

    def _wake(self) -> None:
        """The prefill lane, or the host tier, is done with something (on whatever thread)."""
        with self._wakeup:
            self._engine_woke = True
            self._wakeup.notify()

    def _pass(self, engine: Engine) -> None:
        self._passes += 1
        self.passing = self._passes
        self._run_commands(engine)
        output = None
        if engine.has_work:
            self._flush()
            output = engine.step(time.monotonic())
        self._end_pass(engine, output, time.monotonic())
        self.passing = 0

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
        self._fail_waiters()
        self.deliver(lambda: resolve(self._ended, None))
        self._flush()

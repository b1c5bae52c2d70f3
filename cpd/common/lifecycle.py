"""The life cycle of a worker or router.

    READY ──drain()──▶ DRAINING ──nothing left to do──▶ STOPPING
      └───────────────────stop()──────────────────────────▲

A draining process takes nothing new. What runs may end by itself until the drain's time is over; what happens then is
up to the process.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from math import inf
from typing import Protocol

log = logging.getLogger(__name__)

MAX_DRAIN_S = 86_400.0
"""Longest time of a drain, in seconds."""


class Lifecycle:
    """A process's state and exit code. Used on one event loop.

    Args:
        drain_s: Time of a drain, in seconds.
        on_change: Called when the process begins to drain.

    Attributes:
        failed: The process was not told to stop: its engine or a thread failed, or the engine hangs.
    """

    def __init__(self, drain_s: float, on_change: Callable[[], None] = lambda: None) -> None:
        self._drain_s = drain_s
        self._on_change = on_change
        self._deadline = inf
        self._terminated = False
        self.failed = False
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()
        self.exit_code = 0

    @property
    def time_is_over(self) -> bool:
        """True if the time of a drain is over."""
        return asyncio.get_running_loop().time() >= self._deadline

    def drain(self, reason: str, exit_code: int = 0, timeout_s: float | None = None) -> None:
        """Takes nothing new, and stops when what runs is done. Of several calls the last one's time counts.

        Args:
            exit_code: Keeps that of an earlier call if 0.
            timeout_s: Time for what runs to end by itself; None takes `drain_s`.
        """
        log.info("draining: %s", reason)
        self.exit_code = exit_code or self.exit_code
        time_s = self._drain_s if timeout_s is None else timeout_s
        self._deadline = asyncio.get_running_loop().time() + time_s
        if not self.draining.is_set():
            self.draining.set()
            self._on_change()

    def terminate(self, reason: str) -> None:
        """Drains for at most `drain_s`, also if it drains already; the second call stops. SIGTERM means this."""
        if self._terminated:
            self.stop(reason)
            return
        self._terminated = True
        deadline = self._deadline
        self.drain(reason)
        self._deadline = min(deadline, self._deadline)

    def stop(self, reason: str, exit_code: int | None = None) -> None:
        """Ends the process now. `exit_code` says that it failed; without one, a drain under way keeps its own."""
        if not self.stopping.is_set():
            log.info("stopping: %s", reason)
            if exit_code is not None:
                self.exit_code, self.failed = exit_code, True
            self.draining.set()
            self.stopping.set()


class Ends(Protocol):
    """What can be ended by signals, such as a `Lifecycle`."""

    def terminate(self, reason: str) -> None: ...

    def stop(self, reason: str) -> None: ...


def on_stop_signals(what: Ends) -> None:
    """Lets SIGTERM call `terminate` and SIGINT `stop`, on the running loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, what.terminate, "got SIGTERM")
    loop.add_signal_handler(signal.SIGINT, what.stop, "got SIGINT")

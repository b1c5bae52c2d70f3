"""Waking at exact times.

Event loops round their timers to whole milliseconds, which is too coarse for a schedule that latencies are counted
from. A thread's wait is exact to about 0.1 ms, so one thread holds the alarms of an event loop.
"""

import asyncio
import heapq
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

SWITCH_INTERVAL_S = 1e-4  # how long the alarm thread may wait for the interpreter lock


class Clock:
    """Alarms on `time.perf_counter()` for the running event loop; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)

    def __enter__(self) -> Self:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def call_at(self, due_s: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in the event loop at `due_s`, or at once if that is past."""
        with self._changed:
            self._count += 1
            heapq.heappush(self._alarms, (due_s, self._count, callback))
            if self._alarms[0][1] == self._count:
                self._changed.notify()

    async def until(self, due_s: float) -> None:
        """Returns at `due_s`."""
        woken = asyncio.Event()
        self.call_at(due_s, woken.set)
        await woken.wait()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                wait_s = self._alarms[0][0] - time.perf_counter() if self._alarms else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                else:
                    self._loop.call_soon_threadsafe(heapq.heappop(self._alarms)[2])

"""Exact timers for an event loop.

Event loops round timers to milliseconds, which is too coarse for a schedule from which latencies count. Linux' timer
file descriptors are exact, and an event loop can wait for them as for sockets.
"""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter()
_TFD_TIMER_ABSTIME = 1
_BATCH = 16  # alarms in a row before the loop looks at sockets again


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Clock:
    """Alarms on `time.perf_counter()` for the running event loop; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._alarms: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._libc = ctypes.CDLL(None, use_errno=True)  # Python has these calls from 3.13 on
        self._timer = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "no timer")

    def __enter__(self) -> Self:
        self._loop.add_reader(self._timer, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def call_at(self, due_s: float, callback: Callable[[], object]) -> None:
        """Calls `callback` in the event loop at `due_s`, or soon if that has passed."""
        self._count += 1
        heapq.heappush(self._alarms, (due_s, self._count, callback))
        if self._alarms[0][1] == self._count:
            self._set()

    async def until(self, due_s: float) -> None:
        """Returns at `due_s`."""
        woken = asyncio.Event()
        self.call_at(due_s, woken.set)
        await woken.wait()

    def _set(self) -> None:
        """Sets the timer to the first alarm."""
        seconds, nanoseconds = divmod(max(1, round(self._alarms[0][0] * 1e9)), 1_000_000_000)
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(seconds, nanoseconds))
        self._libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def _ring(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            return  # the timer was set again
        now_s = time.perf_counter()
        for _ in range(_BATCH):
            if not self._alarms or self._alarms[0][0] > now_s:
                break
            heapq.heappop(self._alarms)[2]()
        if self._alarms:
            self._set()

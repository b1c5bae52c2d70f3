"""Measures how long a ready event waits until a client process handles it: the client's own delay."""

import time
from array import array
from collections.abc import Sequence

import numpy as np
import psutil

from bench.load.clock import Clock

INTERVAL_S = 0.01


class LoopLag:
    """Sets an alarm every 10 ms and records how late each is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags = array("d")
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()
        psutil.cpu_percent()  # the next call measures since this one
        self._due_s = self._began_s
        self._next()

    @property
    def lags_s(self) -> Sequence[float]:
        """Lateness of each alarm."""
        return self._lags

    @property
    def cpu_share(self) -> float:
        """CPU time of this process over wall time since this object was made."""
        return (time.process_time() - self._cpu_s) / (time.perf_counter() - self._began_s)

    @property
    def machine_idle(self) -> float:
        """Idle share of the cores' time since this object was made, or since the last call."""
        return 1 - psutil.cpu_percent() / 100

    def _next(self) -> None:
        self._due_s = max(self._due_s + INTERVAL_S, time.perf_counter())
        self._clock.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._lags.append(time.perf_counter() - self._due_s)
        self._next()


def percentile_ms(lags_s: Sequence[float], percent: float) -> float:
    """A percentile of times in seconds, in ms; 0 if there are none."""
    return float(np.percentile(lags_s, percent)) * 1e3 if len(lags_s) else 0.0

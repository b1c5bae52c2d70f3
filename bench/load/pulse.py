"""How long a ready event waits before a client process looks at it: the client's own part in what it measures."""

import time
from array import array
from collections.abc import Sequence

import numpy as np
import psutil

from bench.load.clock import Clock

INTERVAL_S = 0.01


class Pulse:
    """Sets itself an alarm every 10 ms and notes how late each is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags = array("d")
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()
        psutil.cpu_percent()  # the next call tells of the time since this one
        self._due_s = self._began_s
        self._next()

    @property
    def lags_s(self) -> Sequence[float]:
        """How late each alarm was."""
        return self._lags

    @property
    def cpu_share(self) -> float:
        """CPU time of this process since the pulse began, over wall time."""
        return (time.process_time() - self._cpu_s) / (time.perf_counter() - self._began_s)

    @property
    def machine_idle(self) -> float:
        """Share of the time since the pulse began (or this was last asked) in which a core had nothing to do."""
        return 1 - psutil.cpu_percent() / 100

    def _next(self) -> None:
        self._due_s = max(self._due_s + INTERVAL_S, time.perf_counter())
        self._clock.call_at(self._due_s, self._beat)

    def _beat(self) -> None:
        self._lags.append(time.perf_counter() - self._due_s)
        self._next()


def percentile_ms(lags_s: Sequence[float], percent: float) -> float:
    """Of times in seconds, in ms; 0 without any."""
    return float(np.percentile(lags_s, percent)) * 1e3 if len(lags_s) else 0.0

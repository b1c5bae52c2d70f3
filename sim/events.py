"""Virtual time: a queue of calls."""

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Events:
    """Calls in the order of their times; calls at the same time in the order in which they were added.

    Attributes:
        now: Seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules `call(*args)` for `time_s`, which must not have passed."""
        if time_s < self.now:
            raise AssertionError(f"it is {self.now} s: {time_s} s has passed")
        heappush(self._heap, (time_s, next(self._numbers), call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules `call(*args)` in `delay_s` seconds."""
        self.at(self.now + delay_s, call, *args)

    def run(self, until: Callable[[], bool]) -> None:
        """Makes the calls until `until()` is true or none is left.

        The garbage collector is off meanwhile: a cluster has millions of objects, and no cycles among those it drops.
        """
        heap = self._heap
        gc.collect()
        gc.disable()
        try:
            while heap and not until():
                self.now, _, call, args = heappop(heap)
                call(*args)
        finally:
            gc.enable()

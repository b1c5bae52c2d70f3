"""Virtual time: what happens next, and when."""

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Events:
    """A queue of calls, each due at a time; those due at the same time come in the order in which they were added.

    Attributes:
        now: In seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Has `call(*args)` called when it is `time_s`, which must not have passed."""
        if time_s < self.now:
            raise AssertionError(f"it is {self.now} s, so that nothing can be due at {time_s} s")
        heappush(self._heap, (time_s, next(self._numbers), call, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Lets time pass until `until()` or until nothing is left to happen.

        Garbage is collected before, and none is looked for meanwhile: a cluster has millions of objects, and what goes
        while it runs is in no cycles.
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

"""Decides how many workers there should be. Pure.

A number of workers is *enough* for a load if, with the best number of prefill workers, it is predicted to serve all but
MISSED of the requests that would be good (`capacity.py`) with the most workers. Requests that can't be good on idle
workers either need no more workers. `needed(scale)` is the smallest number, between the bounds, that is enough for
`scale` times the measured load, and for the smaller ones of GROW, ROOM and SPARE.

    more    if the present number is not enough for GROW times the load: needed(ROOM)
    fewer   if needed(SPARE) has been below the present number for CALM_S: the largest needed(SPARE) of that time

1 < GROW < ROOM < SPARE: after either change the load must rise or fall by an eighth or more before the next one. A
worker takes minutes to start and its cache longer to fill, so more come early, and fewer remain late.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cpd.planner.capacity import CapacityModel, Demand, Fleet, Targets
from cpd.planner.load import Seen

MISSED = 0.02
"""Share of the good requests that may be lost where workers are enough."""

GROW, ROOM, SPARE = 1.1, 1.25, 1.5
"""Factors of the measured load: see the module."""

CALM_S = 600.0
"""Time for which fewer workers must have been enough before some go, in seconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many workers there should be.

    Attributes:
        reason: Why, as a sentence.
    """

    workers: int
    reason: str


class Sizer:
    """Decides for the workers of one model.

    Args:
        least, most: Bounds of the number of workers.
        began: Time at which it begins, in seconds of the clock of `now`.
    """

    def __init__(self, least: int, most: int, began: float) -> None:
        self._least, self._most = least, most
        self._began = began
        self._needed = deque[tuple[float, int]]()  # times, and `needed(SPARE)`, falling: the first one is the largest

    def size(
        self, demands: Sequence[Demand], seen: Seen, fleet: Fleet, targets: Targets, current: int, now: float
    ) -> Size:
        """Decides for the next minutes; the arguments are those of `Planner.plan`."""
        count = fleet.count
        if not self._least <= count <= self._most:
            return Size(min(max(count, self._least), self._most), f"between {self._least} and {self._most} are wanted")
        model = CapacityModel(demands, fleet, targets, current) if demands else None
        present, room, spare = self._enough(model)
        while self._needed and self._needed[-1][1] <= spare:
            self._needed.pop()
        self._needed.append((now, spare))
        while self._needed[0][0] < now - CALM_S:
            self._needed.popleft()
        if seen.enough and count < present:
            return Size(room, f"the present ones are too few for {GROW:g} times the measured load")
        largest = self._needed[0][1]
        if largest < count and now - self._began >= CALM_S:
            return Size(largest, f"that was enough for {SPARE:g} times the load of the last {CALM_S / 60:.0f} min")
        return Size(count, "as many as needed")

    def _enough(self, model: CapacityModel | None) -> list[int]:
        """Returns how many workers are needed for GROW, ROOM and SPARE times the load."""
        if model is None:
            return [self._least] * 3

        def enough(scale: float) -> int:
            def good(workers: int) -> float:
                return max(one.good_per_s for one in model.predict(range(workers), scale, workers))

            return bisect_left(range(self._most), (1 - MISSED) * good(self._most), self._least, key=good)

        return list(accumulate(map(enough, (GROW, ROOM, SPARE)), max))

"""Decides how many workers are prefill workers, when to change that, and says why. Pure.

All numbers are compared at one load: what is measured or, if even more could be served, as much as the best of them can
serve with `GOOD_SHARE` of the requests good. So the answer depends on the mix of requests, and not on how many there
happen to be; and it is right when it matters, at the limit.

Changes cost: sessions leave their caches, and streams go on beside prompts. So the number stays

- until enough requests were seen,
- for `SETTLE_S` after the load was first measured, as caches that fill up look like a mix of more long prompts,
- for `SETTLE_S` after a change,
- if it is predicted to lose too little of the good requests that the chosen number serves: `MIN_LOSS`, doubled for each
  change in the last hour. So roles can't go to and fro, and change at most 7 times in any hour.

Of the numbers that are predicted to be within `MIN_LOSS` of the best one, the smallest is chosen: what the model does
not know (streams that grow, bursts of them, copies of cached pages) needs combined workers. So the first change in an
hour to a smaller number needs no predicted loss.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpd.planner.capacity import CapacityModel, Demand, Fleet, Prediction, Targets
from cpd.planner.load import Seen

GOOD_SHARE = 0.9
"""Share of the requests that must be good for a load to count as served."""

SETTLE_S = 20.0
"""Time until the first change, and after a change until the next one, in seconds."""

MIN_LOSS = 0.01
"""Smallest predicted loss, relative, for which the number is changed."""

_SCALES = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision.

    Attributes:
        prefill_workers: How many workers should be prefill workers.
        current: How many are.
        reason: Why, as a sentence.
        scale: How many times the measured load the numbers are compared at.
        predictions: What is predicted for each number, at that load.
    """

    prefill_workers: int
    current: int
    reason: str
    scale: float = 1.0
    predictions: tuple[Prediction, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether roles change."""
        return self.prefill_workers != self.current


class Planner:
    """Plans for the workers of one model.

    Args:
        began: Time since which the load has been measured, in seconds of the clock of `now`.
        changes: Times of the changes that an earlier planner made, oldest first.
    """

    def __init__(self, began: float, changes: Iterable[float] = ()) -> None:
        self._began = began
        self._changes = deque(changes)  # times of those in the last hour

    def plan(
        self, demands: Sequence[Demand], seen: Seen, fleet: Fleet, targets: Targets, current: int, now: float
    ) -> Plan:
        """Decides for the next seconds.

        Args:
            demands: The load.
            seen: The requests by which it was measured.
            fleet: All workers.
            current: How many of them are prefill workers.
            now: Time in seconds.
        """
        if not (seen.enough and demands):
            counted = f"{seen.total} so far, {seen.recent:.0f} of them recent"
            return Plan(current, current, f"too few requests to plan by: {counted}")
        if now < self._began + SETTLE_S:
            return Plan(current, current, f"the load has been measured for less than {SETTLE_S:.0f} s")
        if self._changes and now < self._changes[-1] + SETTLE_S:
            return Plan(current, current, "the last change is not settled")
        while self._changes and now >= self._changes[0] + 3600:
            self._changes.popleft()
        model = CapacityModel(demands, fleet, targets, current)
        numbers = range(fleet.count)  # one worker, at least, is combined
        scale, predictions = self._at_the_limit(model, numbers)
        good = {one.prefill_workers: one.good_per_s for one in predictions}
        best = max(good.values())
        chosen = next(number for number in numbers if good[number] >= (1 - MIN_LOSS) * best)
        reason = f"good requests/s by prefill workers: {good[chosen]:.1f} with {chosen}"
        if chosen == current:
            reason += f", at most {best:.1f} with others"
            return Plan(current, current, reason, scale, tuple(predictions))
        reason += f", {good[current]:.1f} with {current}"
        enough = (1 - MIN_LOSS * 2 ** len(self._changes)) * good[chosen]
        if self._changes and good[current] >= enough:
            reason += f": too little for a change, after {len(self._changes)} in the last hour"
            return Plan(current, current, reason, scale, tuple(predictions))
        return Plan(chosen, current, reason, scale, tuple(predictions))

    def changed(self, now: float) -> None:
        """Tells that roles have changed."""
        self._changes.append(now)

    def _at_the_limit(self, model: CapacityModel, numbers: Sequence[int]) -> tuple[float, list[Prediction]]:
        """Returns the load at which to compare, as a factor of the measured one, and the predictions there."""
        for scale in _SCALES:
            predictions = model.predict(numbers, scale)
            if max(one.good_share for one in predictions) < GOOD_SHARE:
                break
        return scale, predictions

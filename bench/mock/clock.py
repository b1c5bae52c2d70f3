"""Time as the mock server's engine sees it: it stops while the server stands still."""


class WorkClock:
    """Seconds of work. Runs as fast as the clock on the wall, except while frozen."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._frozen_until = 0.0
        self._frozen_at = 0.0

    def freeze(self, now: float, seconds: float) -> None:
        """Stops for `seconds` from `now` on, or from the end of the freeze that is going on."""
        if now >= self._frozen_until:
            self._frozen_at = now - self._lost_s
            self._frozen_until = now
        self._frozen_until += seconds
        self._lost_s += seconds

    def work(self, now: float) -> float:
        """Work time at the wall time `now`."""
        return now - self._lost_s if now >= self._frozen_until else self._frozen_at

    def wall(self, work: float) -> float:
        """When work time gets to `work`, if that is ahead and no further freeze comes."""
        return work + self._lost_s

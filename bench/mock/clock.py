"""The mock server's time of work, which stops while the server is frozen."""


class WorkClock:
    """Counts seconds of work. It runs like the wall clock, except while frozen."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._frozen_until = 0.0
        self._frozen_at = 0.0

    def freeze(self, now: float, seconds: float) -> None:
        """Stops for `seconds` from `now`, or from the end of the current freeze."""
        if now >= self._frozen_until:
            self._frozen_at = now - self._lost_s
            self._frozen_until = now
        self._frozen_until += seconds
        self._lost_s += seconds

    def work(self, now: float) -> float:
        """Work time at the wall time `now`."""
        return now - self._lost_s if now >= self._frozen_until else self._frozen_at

    def wall(self, work: float) -> float:
        """Wall time at which work time reaches `work`, without further freezes."""
        return work + self._lost_s

"""Noticing early that a server cannot keep up with an open loop: its queue grows, and with it the latency."""

from collections.abc import Sequence
from itertools import pairwise

from bench.record import Record

_OBSERVE_S = 6.0
_QUARTERS = 4
_GROWTH = 1.3  # from each quarter to the next: what a queue that is stable doesn't do three times in a row
_FEWEST = 8  # requests in flight, below which growth is chance


class Overload:
    """Told what a run's watch is told.

    Attributes:
        seen: Requests in flight and latency have kept growing. Stays so: once the run is ended, both fall.
    """

    def __init__(self) -> None:
        self.seen = False
        self._in_flight: list[tuple[float, int]] = []
        self._latency: list[tuple[float, float]] = []

    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None:
        """See `bench.load.run.Watch`."""
        self._in_flight.append((elapsed_s, in_flight))
        self._latency += [(elapsed_s, record.content_s[0] - record.due_s) for record in finished if record.content_s]
        if elapsed_s >= _OBSERVE_S and in_flight >= _FEWEST:
            self.seen = self.seen or (_keeps_growing(self._in_flight) and _keeps_growing(self._latency))


def _keeps_growing(samples: Sequence[tuple[float, float]]) -> bool:
    """Whether the mean of every quarter of the time is well over that of the quarter before."""
    end_s = samples[-1][0] if samples else 0.0
    quarters: list[list[float]] = [[] for _ in range(_QUARTERS)]
    for at_s, value in samples:
        quarters[min(int(at_s / end_s * _QUARTERS), _QUARTERS - 1)].append(value)
    if not all(quarters):
        return False
    means = [sum(quarter) / len(quarter) for quarter in quarters]
    return all(after > before * _GROWTH for before, after in pairwise(means))

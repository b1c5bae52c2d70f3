"""Detects early that a server cannot keep up with an open loop of constant rate.

    requests waiting for their first token = rate * TTFT

If their number keeps growing, so do latency and concurrency. This does not hold until a while after the first answer,
because at first all requests wait, nor in conversations, whose later turns add requests.
"""

from collections.abc import Sequence
from itertools import pairwise

_OBSERVE_S = 6.0
_SETTLED = 1.5  # times the first answer's TTFT, after which a stable queue no longer grows
_UNANSWERED_S = 30.0  # without any answer, judge after this time
_QUARTERS = 4
_GROWTH = 1.3  # from each quarter to the next; a stable queue does not grow like this three times in a row
_FEWEST = 8  # with fewer waiting requests, growth is chance


class Overload:
    """Stops a run of `bench.load.run.run_load` when the queue keeps growing. `seen` is True once it has."""

    def __init__(self) -> None:
        self.seen = False
        self._waiting: list[tuple[float, int]] = []
        self._answered_s: float | None = None

    def __call__(self, elapsed_s: float, waiting: int, answered: bool) -> bool:
        """True if the queue keeps growing, now or at an earlier call."""
        self._waiting.append((elapsed_s, waiting))
        if answered and self._answered_s is None:
            self._answered_s = elapsed_s
        from_s = _UNANSWERED_S if self._answered_s is None else max(_OBSERVE_S, _SETTLED * self._answered_s)
        if elapsed_s >= from_s and waiting >= _FEWEST:
            self.seen = self.seen or _keeps_growing(self._waiting)
        return self.seen


def _keeps_growing(samples: Sequence[tuple[float, int]]) -> bool:
    """True if the mean of every quarter of the time is well above that of the quarter before."""
    end_s = samples[-1][0]
    quarters: list[list[int]] = [[] for _ in range(_QUARTERS)]
    for at_s, value in samples:
        quarters[min(int(max(at_s, 0.0) / end_s * _QUARTERS), _QUARTERS - 1)].append(value)
    if not all(quarters):
        return False
    means = [sum(quarter) / len(quarter) for quarter in quarters]
    return all(after > before * _GROWTH for before, after in pairwise(means))

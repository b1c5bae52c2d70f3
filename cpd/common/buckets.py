"""Counts of values by their size: workers report them, and routers show them as Prometheus histograms."""

from bisect import bisect_left
from collections.abc import Sequence

TRANSFER_BYTES = tuple(float(1 << exponent) for exponent in range(16, 31, 2))
TRANSFER_S = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
TRANSFER_BYTES_PER_S = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


class Buckets:
    """Counts values.

    Args:
        bounds: Largest value of each bucket but the last, ascending.

    Attributes:
        counts: Number of values in each bucket.
        sum: Sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds = bounds

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

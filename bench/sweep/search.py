"""The search for the highest rate at which a share of the requests is good: pure, so that it can be tested."""

import math
from dataclasses import dataclass, field

_Z = 1.96  # 95 %
_HALVINGS = 8


def share_interval(share: float, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `total` independent ones (Wilson's score interval)."""
    if total == 0:
        return 0.0, 1.0
    z2 = _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def is_enough(interval: tuple[float, float], target: float) -> bool | None:
    """Whether a share of which this is the confidence interval is at least `target`; None while that cannot be told."""
    low, high = interval
    if low >= target:
        return True
    return False if high < target else None


@dataclass(slots=True)
class MaxRate:
    """Doubles the rate until one is too much, then halves the gap (on a logarithmic scale).

    Args:
        start: First rate tried.
        precision: The search ends when the lowest failed rate is at most this share above the highest kept one.
    """

    start: float
    precision: float
    kept: float | None = field(default=None, init=False)
    failed: float | None = field(default=None, init=False)

    def next(self) -> float | None:
        """The rate to try next; None: the search is over."""
        if self.kept is None and self.failed is None:
            return self.start
        if self.failed is None:
            assert self.kept is not None
            return self.kept * 2
        if self.kept is None:
            return self.failed / 2 if self.failed > self.start / 2**_HALVINGS else None
        return math.sqrt(self.kept * self.failed) if self.failed > self.kept * (1 + self.precision) else None

    def tell(self, rate: float, kept: bool) -> None:
        """The server kept the target at this rate, or it did not."""
        if kept:
            self.kept = max(rate, self.kept or rate)
        else:
            self.failed = min(rate, self.failed or rate)

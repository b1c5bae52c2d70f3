"""Searches the highest rate at which a share of the requests meets the target. Pure functions."""

import math
from dataclasses import dataclass, field

_Z = 1.96  # 95 %
_HALVINGS = 8


def share_interval(share: float, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `total` independent requests (Wilson's score interval)."""
    if total == 0:
        return 0.0, 1.0
    z2 = _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def is_enough(interval: tuple[float, float], target: float) -> bool | None:
    """True if a share with this confidence interval is at least `target`; None if the interval includes `target`."""
    low, high = interval
    if low >= target:
        return True
    return False if high < target else None


@dataclass(slots=True)
class MaxRate:
    """Doubles the rate until one misses the target, then bisects the interval on a logarithmic scale.

    Args:
        start: Initial rate.
        precision: The search ends when `missed` is at most this share above `met`.

    Attributes:
        met: Highest rate that met the target.
        missed: Lowest rate that missed it.
    """

    start: float
    precision: float
    met: float | None = field(default=None, init=False)
    missed: float | None = field(default=None, init=False)

    def next(self) -> float | None:
        """The rate to try next; None if the search has ended."""
        if self.met is None and self.missed is None:
            return self.start
        if self.missed is None:
            assert self.met is not None
            return self.met * 2
        if self.met is None:
            return self.missed / 2 if self.missed > self.start / 2**_HALVINGS else None
        return math.sqrt(self.met * self.missed) if self.missed > self.met * (1 + self.precision) else None

    def tell(self, rate: float, met: bool) -> None:
        """Records whether the server met the target at a rate."""
        if met:
            self.met = max(rate, self.met or rate)
        else:
            self.missed = min(rate, self.missed or rate)

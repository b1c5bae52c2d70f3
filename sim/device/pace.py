"""How much longer steps take than the performance model says: noise from step to step, and slow drift."""

from math import exp, sqrt
from random import Random

DRIFT_S = 30.0
"""Time in which drift forgets where it was."""

_GRID_S = 1.0
_DRAWS = 4096


class Pace:
    """Factors of step times, which depend only on the seed and the time at which a step begins.

    So steps that are made one by one and fast-forwarded ones take the same time.

    Args:
        noise: Standard deviation of the logarithm, independent for each step.
        drift: Standard deviation of the logarithm of a factor that changes over DRIFT_S: an Ornstein-Uhlenbeck process.
    """

    def __init__(self, noise: float = 0.0, drift: float = 0.0, seed: int = 0) -> None:
        rng = Random(seed)
        self._noise = [exp(noise * rng.gauss(0, 1) - noise**2 / 2) for _ in range(_DRAWS)] if noise else []
        self._drift = drift
        self._logs = [drift * rng.gauss(0, 1)]  # at the points of a grid in time
        self._rng = rng

    def __call__(self, start_s: float) -> float:
        """Returns the factor of a step that begins at this time."""
        factor = self._noise[hash(start_s) % _DRAWS] if self._noise else 1.0
        return factor * exp(self._drift_at(start_s)) if self._drift else factor

    def _drift_at(self, time_s: float) -> float:
        point, logs = int(time_s / _GRID_S), self._logs
        while len(logs) <= point:
            kept = exp(-_GRID_S / DRIFT_S)
            logs.append(kept * logs[-1] + sqrt(1 - kept**2) * self._drift * self._rng.gauss(0, 1))
        return logs[point]

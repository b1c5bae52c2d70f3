"""The simulated requests: Poisson arrivals whose rate swings over the day and jumps in bursts, for each model apart.

    rate(t) = share · rate · (1 + swing · sin(2π (t / day + phase))) · (burst or 1) / mean of the last factor

Bursts and the times between them have exponentially distributed lengths. Everything follows from the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.workloads.lengths import Distribution
from sim.models.fleet import SimulatedModel
from sim.models.settings import ModelsSettings


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    Attributes:
        model: Name of its model.
        prompt_len, output_len: In tokens.
    """

    time_s: float
    model: str
    prompt_len: int
    output_len: int


def make_arrivals(settings: ModelsSettings, fleet: Sequence[SimulatedModel], seed: int) -> list[Arrival]:
    """Returns the requests of a day in the order of their times.

    Raises:
        ConfigError: A distribution is malformed.
    """
    prompt, output = lengths(settings)
    arrivals = []
    for number, model in enumerate(fleet):
        rng = np.random.default_rng((seed, number))
        for time_s in _times(settings, model.share * settings.rate, rng):
            tokens = max(1, round(prompt.draw(rng))), max(1, round(output.draw(rng)))
            arrivals.append(Arrival(float(time_s), model.spec.name, *tokens))
    return sorted(arrivals, key=lambda one: one.time_s)


def lengths(settings: ModelsSettings) -> tuple[Distribution, Distribution]:
    """Returns the distributions of prompt and output lengths.

    Raises:
        ConfigError: One is malformed.
    """
    return Distribution.parse(settings.prompt, "--prompt"), Distribution.parse(settings.output, "--output")


def _times(
    settings: ModelsSettings, rate: float, rng: np.random.Generator
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Draws the arrival times of a model, by thinning."""
    day_s, burst = settings.day_s, settings.burst
    mean = (settings.quiet_s + burst * settings.burst_s) / (settings.quiet_s + settings.burst_s)
    most = rate * (1 + settings.swing) * burst / mean
    times = np.sort(rng.uniform(0, day_s, rng.poisson(most * day_s)))
    phase = rng.random()
    bursts = np.cumsum(_quiet_and_bursts(settings, rng))  # ends of quiet times and bursts in turn, the first is quiet
    in_burst = np.searchsorted(bursts, times, side="right") % 2 == 1
    factor = (1 + settings.swing * np.sin(2 * np.pi * (times / day_s + phase))) * np.where(in_burst, burst, 1.0) / mean
    kept: np.ndarray[tuple[int], np.dtype[np.float64]] = times[rng.random(times.size) * most < rate * factor]
    return kept


def _quiet_and_bursts(settings: ModelsSettings, rng: np.random.Generator) -> list[float]:
    """Draws lengths of quiet times and bursts in turn, until the day is over."""
    times_s: list[float] = []
    while sum(times_s) <= settings.day_s:
        times_s.append(rng.exponential(settings.burst_s if len(times_s) % 2 else settings.quiet_s))
    return times_s

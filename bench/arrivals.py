"""When sessions are due.

An open loop has its times before the run starts and keeps them whatever the server does; a closed loop has none: a
session is due when a stream (or a user, after a pause) is free for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.settings import RunSettings
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator
from cpd.common.errors import ConfigError

DEFAULT_SESSIONS = 200


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sessions at fixed times: `due_s[i]` is that of session i, in seconds from the start, ascending."""

    due_s: NDArray[np.float64]

    @property
    def offered_per_s(self) -> float | None:
        """Sessions a second that the schedule asks for; None with fewer than two."""
        if len(self.due_s) < 2 or self.due_s[-1] == self.due_s[0]:
            return None
        return float((len(self.due_s) - 1) / (self.due_s[-1] - self.due_s[0]))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of streams at a time, each beginning a session when its last one has ended.

    Args:
        streams: How many.
        sessions: How many sessions there are in all; None is no limit.
        duration_s: For how long new ones begin; None is no limit.
        pause: Makes each stream a user who pauses before every session, the first one included.
        seed: Of the pauses.
    """

    streams: int
    sessions: int | None
    duration_s: float | None
    pause: Distribution | None
    seed: int

    def pause_s(self, session: int) -> float:
        """How long the user of this session pauses before it, in seconds."""
        return self.pause.draw(generator(self.seed, Stream.PAUSE, session)) if self.pause else 0.0


Arrivals = OpenLoop | ClosedLoop


def plan_arrivals(settings: RunSettings, size: int | None, times_s: Sequence[float] | None, seed: int) -> Arrivals:
    """The arrivals that the settings ask for, for a workload of `size` sessions (None: endless).

    `times_s` are the workload's own times, used when none of the three ways to load a server was chosen.

    Raises:
        ConfigError: More than one way was chosen, or none; or a setting does not belong to the chosen one.
    """
    _check(settings, times_s)
    limit = settings.num_requests
    if limit is None and settings.duration is None:
        limit = DEFAULT_SESSIONS if size is None else size
    if size is not None:
        limit = size if limit is None else min(limit, size)
    streams = settings.concurrency or settings.users
    if streams:
        pause = Distribution.parse(settings.think_s, "--think-s", least=0) if settings.users else None
        return ClosedLoop(streams, limit, settings.duration, pause, seed)
    if settings.rate:
        due_s = _scheduled(settings, settings.rate, limit, np.random.default_rng(seed))
    else:
        due_s = np.asarray(times_s, dtype=np.float64)[:limit]
    if settings.duration is not None:
        due_s = due_s[due_s < settings.duration]
    return OpenLoop(due_s)


def _check(settings: RunSettings, times_s: Sequence[float] | None) -> None:
    chosen = [name for name in ("concurrency", "rate", "users") if getattr(settings, name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"choose one of --{chosen[0]} and --{chosen[1]}")
    if not chosen and times_s is None:
        raise ConfigError("say how to load the server: --concurrency N, --rate R, or --users N")
    if settings.rate is None and (settings.rate_end is not None or settings.arrival != "poisson"):
        raise ConfigError("--rate-end and --arrival belong to an open loop: give --rate")
    if settings.burstiness != 1.0 and settings.arrival != "gamma":
        raise ConfigError("--burstiness belongs to --arrival gamma")


def _scheduled(settings: RunSettings, rate: float, limit: int | None, rng: np.random.Generator) -> NDArray[np.float64]:
    """Times of an open loop whose rate goes evenly from `rate` to `rate_end`."""
    rate_end = settings.rate_end or rate
    mean_rate = (rate + rate_end) / 2
    duration_s = settings.duration
    if limit is None:
        assert duration_s is not None  # one of the two limits is always set
        if math.isinf(duration_s * mean_rate):
            raise ConfigError("so many sessions have no end: give --num-requests")
        limit = int(duration_s * mean_rate + 10 * np.sqrt(duration_s * mean_rate / min(settings.burstiness, 1))) + 16
    shape = {"poisson": 1.0, "gamma": settings.burstiness, "constant": np.inf}[settings.arrival]
    gaps = np.ones(limit) if np.isinf(shape) else rng.gamma(shape, 1 / shape, limit)
    due = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])  # in units of one mean gap: session number at an even rate
    if rate_end == rate:
        return due / rate
    # The rate is r(t) = rate + slope * t up to span_s; session number n is due when the integral of r reaches n.
    span_s = duration_s if duration_s is not None else limit / mean_rate
    slope = (rate_end - rate) / span_s
    ramped = (np.sqrt(np.maximum(rate * rate + 2 * slope * due, 0)) - rate) / slope
    return np.where(due <= mean_rate * span_s, ramped, span_s + (due - mean_rate * span_s) / rate_end)

"""Arrival times of sessions.

An open loop fixes all times before the run, independent of the server. In a closed loop a session is due when a stream
(or a user, after a pause) is free.
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
    """Sessions at fixed times: `due_s[i]` is the time of session i, in seconds from the start, ascending."""

    due_s: NDArray[np.float64]

    @property
    def offered_per_s(self) -> float | None:
        """Scheduled sessions per second; None with fewer than two sessions."""
        if len(self.due_s) < 2 or self.due_s[-1] == self.due_s[0]:
            return None
        return float((len(self.due_s) - 1) / (self.due_s[-1] - self.due_s[0]))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Concurrent streams, each of which begins a session when its last one has ended.

    Args:
        streams: Number of streams.
        sessions: Number of sessions in all; None for no limit.
        duration_s: Seconds in which sessions begin; None for no limit.
        pause: Pause before every session, if the streams are users.
        seed: Seed of the pauses.
    """

    streams: int
    sessions: int | None
    duration_s: float | None
    pause: Distribution | None
    seed: int

    def pause_s(self, session: int) -> float:
        """Pause before a session, in seconds."""
        return self.pause.draw(generator(self.seed, Stream.PAUSE, session)) if self.pause else 0.0


Arrivals = OpenLoop | ClosedLoop


def plan_arrivals(settings: RunSettings, size: int | None, times_s: Sequence[float] | None, seed: int) -> Arrivals:
    """The arrivals that the settings describe.

    Args:
        settings: The load.
        size: Sessions of the workload; None if it is endless.
        times_s: The workload's own times, used if the settings choose no load.
        seed: Seed of the arrivals.

    Raises:
        ConfigError: The settings choose several loads or none, or a setting does not fit the chosen one.
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
        raise ConfigError("choose a load: --concurrency N, --rate R, or --users N")
    if settings.rate is None and (settings.rate_end is not None or settings.arrival != "poisson"):
        raise ConfigError("--rate-end and --arrival belong to an open loop: give --rate")
    if settings.burstiness != 1.0 and settings.arrival != "gamma":
        raise ConfigError("--burstiness belongs to --arrival gamma")


def _scheduled(settings: RunSettings, rate: float, limit: int | None, rng: np.random.Generator) -> NDArray[np.float64]:
    """Times of an open loop; the rate changes linearly from `rate` to `rate_end`."""
    rate_end = settings.rate_end or rate
    mean_rate = (rate + rate_end) / 2
    duration_s = settings.duration
    if limit is None:
        assert duration_s is not None  # one of the two limits is always set
        if math.isinf(duration_s * mean_rate):
            raise ConfigError("the number of sessions is infinite: give --num-requests")
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

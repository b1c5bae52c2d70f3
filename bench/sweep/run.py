"""Runs the points of a sweep, or of the search for the highest rate."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console

from bench.load.overload import Overload
from bench.load.run import enough_processes, never
from bench.prepare import Prepared
from bench.report.progress import LiveProgress
from bench.result import Accuracy, Result
from bench.run import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_COMPLETED,
    UNKNOWN_STREAMS,
    begin,
    check_writable,
    command_line,
    measure,
    save_and_show,
)
from bench.settings import LoadSettings, RunSettings
from bench.slo import Slo
from bench.sweep.report import show, write_html
from bench.sweep.result import Point, Sweep
from bench.sweep.search import MaxRate, is_enough, share_interval
from bench.sweep.settings import SweepSettings
from cpd.common.errors import ConfigError, CPDError

_DURATION_S = 20.0  # per load, without --duration and --num-requests
_ONE_TURN = ("random", "shared-prefix", "trace")  # workloads with one turn per session
_RUNS = 3  # most runs of one rate, if the share of good requests is too close to the target


def sweep(settings: SweepSettings) -> int:
    """Runs, saves and shows a sweep. Returns the exit code."""
    check_writable(settings)
    loads = _loads(settings)
    slo = Slo.parse(settings.slo) if settings.slo else None
    if settings.duration is None and settings.num_requests is None:
        settings = settings.model_copy(update={"duration": _DURATION_S})
    messages = Console(stderr=True)
    streams = max((int(load.value) for load in loads if load.way == "concurrency"), default=UNKNOWN_STREAMS)
    prepared, accuracy = begin(settings, streams, settings.processes or enough_processes(streams), messages)
    search = MaxRate(settings.rate or 1.0, settings.precision) if settings.find_max_rate else None
    points: list[Point] = []
    try:
        with LiveProgress(messages) as progress:
            driver = _Driver(settings, prepared, slo, accuracy, progress, messages)
            for point in driver.search(search) if search else driver.sweep(loads):
                points.append(point)
    except KeyboardInterrupt:  # between runs; during a run Ctrl-C ends it with a result
        _report(settings, points, search, interrupted=True)
        return EXIT_INTERRUPTED
    except CPDError:  # such as a server that is gone
        _report(settings, points, search, interrupted=True)
        raise
    interrupted = any(point.result.interrupted for point in points)
    return _exit_code(_report(settings, points, search, interrupted=interrupted))


def _report(settings: SweepSettings, points: list[Point], search: MaxRate | None, *, interrupted: bool) -> Sweep:
    """Saves and shows the measured loads."""
    found = Sweep(
        command=command_line(sys.argv),
        settings=settings.model_dump(mode="json"),
        interrupted=interrupted,
        points=sorted(points, key=lambda point: point.load),
        max_rate=search.met if search else None,
        too_much=search.missed if search else None,
    )
    if not points:
        return found
    found.interrupted |= save_and_show(
        settings, found, lambda page: write_html(found, page), lambda console: show(found, console)
    )
    return found


@dataclass(frozen=True, slots=True)
class _Load:
    way: Literal["rate", "concurrency"]
    value: float

    def of(self, settings: SweepSettings) -> RunSettings:
        """The settings of a run at this load."""
        shared = {name: getattr(settings, name) for name in LoadSettings.model_fields}
        value = int(self.value) if self.way == "concurrency" else self.value
        return RunSettings.model_construct(**{**shared, "rate": None, self.way: value})


@dataclass(slots=True)
class _Driver:
    """Measures loads one after the other."""

    _settings: SweepSettings
    _prepared: Prepared
    _slo: Slo | None
    _accuracy: Accuracy | None
    _progress: LiveProgress
    _messages: Console
    _runs: int = 0

    def sweep(self, loads: list[_Load]) -> Iterator[Point]:
        """Yields a point for each load."""
        for load in loads:
            overload = Overload()
            result = self._measure(load, overload)
            point = self._point(load, overload.seen, [result])
            yield point
            if result.interrupted:
                return

    def search(self, search: MaxRate) -> Iterator[Point]:
        """Yields points until the search has ended, and tells it whether each rate met the target."""
        while (rate := search.next()) is not None:
            load = _Load("rate", rate)
            results: list[Result] = []
            while len(results) < _RUNS:
                overload = Overload()
                results.append(self._measure(load, overload))
                point = self._point(load, overload.seen, results)
                if point.met is not None or results[-1].interrupted:
                    break
            if results[-1].interrupted:
                yield point
                return
            if point.met is None:  # still too close: decide by the share itself
                point = point.model_copy(update={"met": (point.share or 0.0) >= self._settings.slo_share})
            yield point
            if point.result.client.limited:
                return
            search.tell(rate, bool(point.met))

    def _measure(self, load: _Load, overload: Overload) -> Result:
        self._messages.print(f"{load.way} {load.value:g}", style="bold")
        # Each run has its own seed, so that no prompt is in the cache of the run before.
        prepared = replace(self._prepared, seed=self._prepared.seed + self._runs)
        self._runs += 1
        enough = overload if load.way == "rate" and self._settings.workload in _ONE_TURN else never
        return measure(load.of(self._settings), prepared, self._slo, self._accuracy, self._progress, enough)

    def _point(self, load: _Load, overloaded: bool, results: list[Result]) -> Point:
        point = Point(load=load.value, overloaded=overloaded, met=None, share=None, share_ci=None, result=results[-1])
        if self._slo is None:
            return point
        judged = [request for result in results for request in result.requests if request.good is not None]
        share = sum(request.good is True for request in judged) / len(judged) if judged else None
        # The turns of a session are similar: counting each session once keeps the interval from being too narrow.
        sessions = sum(len({request.session for request in result.requests}) for result in results)
        interval = share_interval(share or 0.0, min(sessions, len(judged)))
        enough = False if overloaded else is_enough(interval, self._settings.slo_share)
        return point.model_copy(update={"met": enough, "share": share, "share_ci": interval})


def _loads(settings: SweepSettings) -> list[_Load]:
    """The loads of a sweep; empty for a search.

    Raises:
        ConfigError: None or several of the options are given, or a list is malformed.
    """
    ways = [bool(settings.rates), bool(settings.concurrencies), settings.find_max_rate]
    if sum(ways) != 1:
        raise ConfigError("a sweep needs one of --rates, --concurrencies and --find-max-rate")
    if settings.rate and not settings.find_max_rate:
        raise ConfigError("--rate is the initial rate of --find-max-rate: a sweep takes --rates")
    if settings.find_max_rate:
        if not settings.slo:
            raise ConfigError("--find-max-rate needs --slo, such as ttft=2000,itl=50")
        return []
    try:
        if settings.rates:
            rates = [float(text) for text in settings.rates.split(",")]
            if all(0 < rate < math.inf for rate in rates):
                return [_Load("rate", rate) for rate in rates]
        else:
            streams = [int(text) for text in settings.concurrencies.split(",")]
            if min(streams) > 0:
                return [_Load("concurrency", number) for number in streams]
    except ValueError:
        pass
    raise ConfigError("--rates and --concurrencies take comma-separated positive numbers such as 1,2,4")


def _exit_code(found: Sweep) -> int:
    if found.interrupted:
        return EXIT_INTERRUPTED
    if any(point.result.client.limited for point in found.points):
        return EXIT_CLIENT_LIMITED
    return 0 if any(point.result.summary.completed for point in found.points) else EXIT_NOTHING_COMPLETED

"""Compares runs: the ratio of each figure to the first run's, and whether it may be chance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.result import Result, Stat, Summary
from bench.settings import RunSettings

Interval = tuple[float, float]

# Settings that don't affect the measurement.
_WITHOUT_EFFECT = {"json_file", "html_file", "selftest", "processes", "api_key", "seed", "tokenizer"}
_SERVER = {"url", "model"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of all runs.

    Attributes:
        name: Name and unit.
        lower_is_better: None if neither is better.
        values: The value of each run.
        intervals: The 95 % confidence interval of each run; None if unknown.
    """

    name: str
    lower_is_better: bool | None
    values: Sequence[float | None]
    intervals: Sequence[Interval | None]

    def ratio(self, run: int) -> float | None:
        """The figure of `run` divided by that of the first run."""
        first, value = self.values[0], self.values[run]
        return value / first if first and value is not None else None

    def overlap(self, run: int) -> bool | None:
        """True if the intervals of `run` and the first run overlap; None if one is unknown."""
        first, other = self.intervals[0], self.intervals[run]
        if first is None or other is None:
            return None
        return first[0] <= other[1] and other[0] <= first[1]

    def better(self, run: int) -> bool | None:
        """True if `run` is better than the first run; None if the intervals overlap or the difference is below 1 %."""
        ratio = self.ratio(run)
        if self.lower_is_better is None or ratio is None or self.overlap(run) is not False or abs(ratio - 1) < 0.01:
            return None
        return (ratio < 1) == self.lower_is_better


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which runs differ.

    Attributes:
        name: Name of the setting.
        values: The value of each run.
        same_load: True if the load is still the same, and only the server or model differs.
    """

    name: str
    values: Sequence[str]
    same_load: bool


def figures(results: Sequence[Result]) -> list[Figure]:
    """The figures that at least one run has."""
    latencies: list[tuple[str, Callable[[Summary], Stat]]] = [
        ("TTFT", lambda summary: summary.ttft_ms),
        ("First gap", lambda summary: summary.first_gap_ms),
        ("ITL", lambda summary: summary.itl_ms),
        ("TPOT", lambda summary: summary.tpot_ms),
        ("E2E", lambda summary: summary.e2e_ms),
    ]
    others: list[tuple[str, bool | None, Callable[[Summary], float | None]]] = [
        ("Output tokens/s", False, lambda summary: summary.output_tokens_per_s),
        ("Requests/s", False, lambda summary: summary.requests_per_s),
        ("Goodput, requests/s", False, lambda summary: summary.goodput_per_s),
        ("Cached prompt tokens, %", None, lambda summary: _percent(summary.cached_token_rate)),
        ("Failed requests", True, lambda summary: summary.failed),
        ("Prompt tokens a request", None, lambda summary: _each(summary.prompt_tokens, summary)),
        ("Output tokens a request", None, lambda summary: _each(summary.output_tokens, summary)),
    ]
    summaries = [result.summary for result in results]
    found = [
        Figure(
            f"{name} {percentile}, ms",
            True,
            [getattr(stat(summary), percentile) for summary in summaries],
            [stat(summary).ci.get(percentile) for summary in summaries],
        )
        for name, stat in latencies
        for percentile in ("p50", "p90", "p99")
    ]
    unknown = [None] * len(results)
    found += [Figure(name, lower, [value(summary) for summary in summaries], unknown) for name, lower, value in others]
    return [figure for figure in found if any(value is not None for value in figure.values)]


def differences(results: Sequence[Result]) -> list[Difference]:
    """The settings in which the runs differ; those that change the load come first."""
    names = [name for name in RunSettings.model_fields if name not in _WITHOUT_EFFECT]
    found = []
    for name in names:
        values = [_shown(result.settings.get(name)) for result in results]
        if len(set(values)) > 1:
            found.append(Difference(name.replace("_", "-"), values, same_load=name in _SERVER))
    return sorted(found, key=lambda difference: difference.same_load)


def _each(tokens: int | None, summary: Summary) -> float | None:
    return tokens / summary.completed if tokens is not None and summary.completed else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _shown(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)

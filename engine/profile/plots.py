"""Plots of `cpd profile`, as plotly.js' JSON with the colour names of `bench.report.page`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cpd.performance.fit import Sample
from cpd.performance.model import PerfModel, Profile, Work
from engine.profile.budget import BudgetSweep


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart.

    Attributes:
        title: Title with the unit.
        traces, layout: See plotly.js.
        note: How to read the chart.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""


def profile_plots(profile: Profile, samples: Sequence[Sample]) -> list[Plot]:
    """Plots measured and predicted steps, and the speed on shares of the device."""
    model = PerfModel(profile)
    whole = [sample for sample in samples if sample.share == 1 and not sample.other_lane]
    decodes = _grouped((s.work.context // s.work.seqs, s) for s in whole if s.work.is_decode)
    prefills = _grouped((s.work.context - s.work.tokens, s) for s in whole if s.work.tokens > s.work.seqs == 1)
    note = "Dots are measured, lines predicted."
    plots = [
        Plot("Decode step, ms", _curves(model, decodes, "{:,} tokens each"), _steps_over("sequences"), note),
        Plot("Prefill chunk, ms", _curves(model, prefills, "after {:,} tokens"), _steps_over("tokens"), note),
        _error_plot(model, samples),
    ]
    if len(profile.shares) > 1:
        plots.append(_share_plot(profile, model))
    return plots


def budget_plot(sweep: BudgetSweep) -> Plot:
    """Plots the Pareto curve of token budgets."""
    points = sweep.points
    curve = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": "token budget",
        "x": [point.slowdown for point in points],
        "y": [point.prefill_ms for point in points],
        "text": [str(point.token_budget) for point in points],
        "textposition": "top right",
        "line": {"color": "$1"},
    }
    knee = {
        "type": "scatter",
        "mode": "markers",
        "name": "knee",
        "x": [sweep.knee.slowdown],
        "y": [sweep.knee.prefill_ms],
        "marker": {"color": "$good", "size": 14, "symbol": "circle-open"},
    }
    layout = {"xaxis": _axis("decode slowdown", log=True), "yaxis": _axis("prefill, ms", log=True)}
    return Plot("Prefill latency against decode slowdown", [curve, knee], layout, "Nearer to the lower left is better.")


def _grouped(samples: Iterable[tuple[int, Sample]]) -> dict[int, list[Sample]]:
    groups: defaultdict[int, list[Sample]] = defaultdict(list)
    for key, sample in samples:
        groups[key].append(sample)
    return {key: sorted(groups[key], key=lambda sample: sample.work.tokens) for key in sorted(groups)}


def _curves(model: PerfModel, groups: dict[int, list[Sample]], name: str) -> list[dict[str, Any]]:
    traces = []
    for index, (key, samples) in enumerate(groups.items()):
        colour, tokens = f"${index % 6 + 1}", [sample.work.tokens for sample in samples]
        traces += [
            _line(name.format(key), tokens, [model.step_ms(sample.work) for sample in samples], colour),
            {
                "type": "scatter",
                "mode": "markers",
                "x": tokens,
                "y": [sample.ms for sample in samples],
                "marker": {"color": colour, "size": 7},
                "showlegend": False,
            },
        ]
    return traces


def _error_plot(model: PerfModel, samples: Sequence[Sample]) -> Plot:
    kinds = {
        "decode": [s for s in samples if s.work.is_decode],
        "with prefill": [s for s in samples if not s.work.is_decode],
    }
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [s.ms for s in chosen],
            "y": [100 * (model.step_ms(s.work, s.share, s.other_lane) / s.ms - 1) for s in chosen],
            "marker": {"color": f"${index + 1}", "size": 6},
        }
        for index, (name, chosen) in enumerate(kinds.items())
    ]
    layout = {"xaxis": _axis("measured, ms", log=True), "yaxis": _axis("%")}
    return Plot("Predicted against measured, %", traces, layout, "Above zero: predicted too long.")


def _share_plot(profile: Profile, model: PerfModel) -> Plot:
    shares = [part.share for part in profile.shares]
    works = {
        "prefill, 512 tokens": Work.prefill(512),
        "decode, 32 x 1,024": Work.decode(32, 32 * 1024),
        "decode, 1 x 1,024": Work.decode(1, 1024),
    }
    traces = [
        _line(name, shares, [model.step_ms(work) / model.step_ms(work, share) for share in shares], f"${index + 1}")
        for index, (name, work) in enumerate(works.items())
    ]
    layout = {
        "xaxis": {**_axis("share of the device"), "tickformat": ".0%"},
        "yaxis": {**_axis("speed"), "tickformat": ".0%", "rangemode": "tozero"},
    }
    return Plot("Speed on a share of the device", traces, layout, "Relative to the whole device; other lane idle.")


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": {"color": colour}}


def _steps_over(x: str) -> dict[str, Any]:
    return {"xaxis": _axis(x, log=True), "yaxis": _axis("ms", log=True)}


def _axis(title: str, *, log: bool = False) -> dict[str, Any]:
    return {"title": {"text": title}, "type": "log" if log else "linear"}

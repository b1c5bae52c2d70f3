"""Profiling a real model for a second, and printing the result."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cpd.common.errors import ConfigError
from cpd.performance.fit import Sample, fit_profile
from cpd.performance.model import PerfModel, Profile, Work
from engine.execution.runner import TorchRunner
from engine.profile.budget import sweep_budget
from engine.profile.labels import profile_labels
from engine.profile.lanes import measure_samples
from engine.profile.measure import Limits
from engine.profile.plots import Plot, budget_plot, profile_plots
from engine.profile.report import show_budget, show_profile, show_splits
from engine.profile.run import run_budget, run_profile
from engine.profile.settings import BudgetSettings, ProfileSettings
from engine.profile.splits import split_table
from engine.profile.steps import Step
from tests.conftest import MakeCheckpoint


@pytest.fixture(scope="module")
def profiled(checkpoint: MakeCheckpoint) -> tuple[Profile, list[Sample]]:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=8 << 20, max_model_len=0)
    limits = Limits(seqs=16, length=runner.config.max_model_len, pages=runner.num_pages)
    fractions: list[float] = []
    samples = measure_samples(runner, limits, 1.0, lambda what, fraction: fractions.append(fraction))
    assert fractions[-1] == 1
    return fit_profile(samples, model="m", device="d", units=2), samples


def text_of(show: object, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(*arguments, console)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def check(plots: list[Plot]) -> None:
    """Asserts that plots can be written as JSON, and that points have both coordinates."""
    for plot in plots:
        json.dumps([plot.traces, plot.layout])
        assert plot.traces
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in plot.traces)


def test_a_real_model_gets_a_profile(profiled: tuple[Profile, list[Sample]]) -> None:
    profile, samples = profiled
    assert profile.source == "measured"
    assert len(samples) > 20
    assert {sample.work.is_decode for sample in samples} == {True, False}
    model = PerfModel(profile)
    assert model.step_ms(Work.prefill(256)) > model.step_ms(Work.decode(1, 16)) > 0


def test_a_processor_is_described_by_its_cores() -> None:
    said = profile_labels(Path("models/tiny"), "bfloat16", torch.device("cpu"))
    assert said["device"]
    assert (said["model"], said["units"], said["unit_step"]) == ("tiny, bfloat16", len(os.sched_getaffinity(0)), 1)


def test_a_profile_is_shown_with_its_error(profiled: tuple[Profile, list[Sample]]) -> None:
    profile, samples = profiled
    text = text_of(show_profile, profile)
    assert profile.error is not None
    assert f"median {profile.error.median:.1%}" in text
    assert "not measured" not in text
    assert "not measured" in text_of(show_profile, profile.model_copy(update={"source": "roofline"}))
    check(profile_plots(profile, samples))
    for p95, warned in ((0.2, False), (0.3, True)):
        error = profile.error.model_copy(update={"p95": p95})
        assert ("measure again" in text_of(show_profile, profile.model_copy(update={"error": error}))) == warned


def test_shares_are_shown_side_by_side(profiled: tuple[Profile, list[Sample]]) -> None:
    profile, samples = profiled
    whole = profile.shares[0]
    half = whole.model_copy(update={"share": 0.5, "decode": whole.decode.model_copy(update={"slowdown": 1.25})})
    both = profile.model_copy(update={"shares": (half, *profile.shares)})
    text = text_of(show_profile, both)
    assert "1 of 2" in text
    assert "x 1.25" in text
    check(profile_plots(both, samples))
    found = split_table(both, prompt=512, decodes=8, context=128, itl_ms=0, prepared=3)
    assert "1 + 1" in text_of(show_splits, found)


def test_the_sweep_is_shown_with_its_knee() -> None:
    def run(step: Step) -> float:
        return 5 + step.work.tokens / 50

    sweep = sweep_budget(run, decodes=8, context=64, prompt=2000, seconds=1, on_progress=lambda fraction: None)
    text = text_of(show_budget, sweep)
    assert f"--token-budget {sweep.knee.token_budget}" in text
    assert text.count("the knee") == 1
    check([budget_plot(sweep)])


def test_a_sweep_that_does_not_fit_is_refused(checkpoint: MakeCheckpoint) -> None:
    settings = BudgetSettings.load({"kv_memory": "1MiB", "decodes": 90})
    with pytest.raises(ConfigError, match="raise --kv-memory"):
        run_budget(settings, Path(checkpoint("qwen3")), lambda what, fraction: None)


def test_settings_that_leave_too_little_to_measure_are_refused(checkpoint: MakeCheckpoint) -> None:
    settings = ProfileSettings.load({"max_num_seqs": 1, "max_model_len": 64, "kv_memory": "1MiB"})
    with pytest.raises(ConfigError, match=r"too few decode steps .* raise --max-num-seqs"):
        run_profile(settings, Path(checkpoint("qwen3")), lambda what, fraction: None)

"""Measuring token budgets, and their knee."""

import pytest

from engine.profile.budget import BudgetPoint, knee_of, sweep_budget
from engine.profile.steps import Step


def gpu_like(step: Step) -> float:
    """Reading the weights takes as long as computing 300 tokens."""
    return 5 * max(1.0, step.work.tokens / 300) + 1e-7 * step.work.pairs


def test_a_larger_budget_prefills_faster_and_slows_decodes_more() -> None:
    sweep = sweep_budget(gpu_like, decodes=32, context=512, prompt=4096, seconds=1, on_progress=lambda fraction: None)
    assert [point.token_budget for point in sweep.points] == [128, 256, 512, 1024, 2048, 4096, 8192]
    prefills, stretches = ([getattr(point, name) for point in sweep.points] for name in ("prefill_ms", "slowdown"))
    assert prefills == sorted(prefills, reverse=True)
    assert stretches == sorted(stretches)
    assert sweep.decode_ms == pytest.approx(gpu_like(Step.decode(32, 512)))
    assert sweep.points[0].slowdown < 1.1
    assert sweep.knee.token_budget in (256, 512)  # from 300 tokens on a larger budget mostly lengthens steps
    chunk = Step.decode(32, 512) + Step.prefill(480, 3 * 480)
    assert sweep.points[2].step_ms > gpu_like(chunk)
    assert sweep.points[2].prefill_ms > 8 * gpu_like(chunk)


def test_budgets_that_compute_the_prompt_in_one_chunk_are_measured_once() -> None:
    sweep = sweep_budget(gpu_like, decodes=8, context=64, prompt=600, seconds=1, on_progress=lambda fraction: None)
    assert [point.token_budget for point in sweep.points] == [128, 256, 512, 1024]


def point(budget: int, prefill_ms: float, slowdown: float) -> BudgetPoint:
    return BudgetPoint(budget, prefill_ms, slowdown * 10, slowdown)


def test_the_knee_is_where_the_curve_bends() -> None:
    curve = [point(128, 900, 1.1), point(256, 450, 1.2), point(512, 250, 1.4), point(1024, 200, 3), point(2048, 180, 6)]
    assert knee_of(curve).token_budget == 512
    assert knee_of(curve[:1]) == curve[0]
    flat = [point(128, 900, 1.0), point(256, 500, 1.0)]
    assert knee_of(flat).token_budget == 256

"""Profiles that are wrong on purpose."""

from random import Random

import pytest

from cpd.performance.model import PerfModel, Profile, Work
from sim.cluster.mistakes import mistaken

PROFILE = Profile.load("h200-qwen3-8b")
WORKS = (Work.decode(1, 100), Work.decode(64, 64_000), Work.prefill(4096), Work.prefill(512, 20_000))


def test_no_error_changes_nothing() -> None:
    assert mistaken(PROFILE, 0.0, Random(0)) == PROFILE


@pytest.mark.parametrize("seed", range(5))
def test_each_time_is_wrong_by_at_most_the_error(seed: int) -> None:
    truth, believed = PerfModel(PROFILE), PerfModel(mistaken(PROFILE, 0.5, Random(seed)))
    ratios = [believed.step_ms(work) / truth.step_ms(work) for work in WORKS]
    assert all(0.5 <= ratio <= 1.5 for ratio in ratios)
    assert len({round(ratio, 3) for ratio in ratios}) > 2
    assert believed.transfer_ms(1 << 30) != truth.transfer_ms(1 << 30)

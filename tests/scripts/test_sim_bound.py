import pytest

from cpd.performance.model import PerfModel, Profile
from scripts.sim_bound import devices, highest_rate, modes, needs
from sim.cluster.settings import CompareSettings

SETTINGS = CompareSettings(warmup=1.0, duration=2.0)
MODEL = PerfModel(Profile.load(SETTINGS.profile))


def test_devices_that_take_turns_need_the_sum_and_lanes_less() -> None:
    turns = [(1.0, 0.0), (0.0, 1.0)]
    lanes = [*turns, (0.5, 0.9)]
    assert devices(2.0, 3.0, turns) == pytest.approx(5.0)
    assert devices(1.0, 1.8, lanes) == pytest.approx(2.0)
    assert devices(2.0, 1.8, lanes) == pytest.approx(3.0)  # the others run one after the other
    assert devices(1.0, 2.8, lanes) == pytest.approx(3.0)


def test_more_devices_bear_a_higher_rate_and_leaving_out_the_longest_does_too() -> None:
    ways = modes(MODEL, lanes=True)
    few, many = (highest_rate(SETTINGS.model_copy(update={"workers": n}), MODEL, ways, 0.0) for n in (8, 16))
    assert few < many < highest_rate(SETTINGS, MODEL, ways, 0.05)


def test_only_what_comes_in_the_measured_time_counts() -> None:
    whole, part = (len(list(needs(SETTINGS.model_copy(update={"duration": s}), MODEL, 100.0))) for s in (2.0, 0.5))
    assert 0 < part < whole

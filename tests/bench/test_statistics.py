import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.statistics import CONFIDENCE, PERCENTILES, stat

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(values)
def test_percentiles_are_those_of_numpy(sample: list[float]) -> None:
    figures = stat(sample, [0] * len(sample))
    assert figures.count == len(sample)
    assert figures.mean == pytest.approx(np.mean(sample))
    for name, percent in PERCENTILES.items():
        assert getattr(figures, name) == pytest.approx(np.percentile(sample, percent))


def test_no_values_no_figures() -> None:
    figures = stat([], [])
    assert (figures.count, figures.mean, figures.p50, figures.p999, figures.ci) == (0, None, None, None, {})


def test_one_session_says_nothing_about_others() -> None:
    assert stat([1.0, 2.0, 3.0], [7, 7, 7]).ci == {}


def test_intervals_are_those_of_resamples_of_whole_sessions_written_out() -> None:
    random = np.random.default_rng(1)
    sizes = [3, 1, 8, 5, 2]
    sessions = [random.gamma(2, 10, size) for size in sizes]
    draws = np.random.default_rng(0)
    drawn = []
    for _ in range(1000):
        sample = np.concatenate([sessions[index] for index in draws.integers(0, 5, 5)])
        drawn.append([sample.mean(), *np.percentile(sample, list(PERCENTILES.values()))])
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)

    shuffle = random.permutation(sum(sizes))
    figures = stat(np.concatenate(sessions)[shuffle], np.repeat([10, 20, 30, 40, 50], sizes)[shuffle])

    for index, name in enumerate(("mean", *PERCENTILES)):
        assert figures.ci[name] == pytest.approx((low[index], high[index]))


def test_intervals_hold_the_truth_about_as_often_as_they_say_though_values_of_a_session_are_alike() -> None:
    random = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        levels = random.normal(100, 10, 40)
        sample = np.concatenate([random.normal(level, 1, 30) for level in levels])
        low, high = stat(sample, np.repeat(np.arange(40), 30)).ci["mean"]
        held += low <= 100 <= high
    assert held >= 50  # 57 are expected; intervals of independent values would hold it in about 20


@settings(max_examples=20)
@given(values)
def test_the_same_values_have_the_same_intervals(sample: list[float]) -> None:
    sessions = [index % 3 for index in range(len(sample))]
    assert stat(sample, sessions) == stat(sample, sessions)


def test_many_values_take_fewer_resamples_and_still_have_intervals() -> None:
    sample = np.random.default_rng(3).exponential(10, 400_000)
    figures = stat(sample, np.arange(400_000) // 400)
    low, high = figures.ci["p99"]
    assert low < 10 * np.log(100) < high
    assert high - low < 2

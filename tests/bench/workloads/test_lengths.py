"""Parsing of length distributions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.lengths import Distribution
from cpd.common.errors import ConfigError


def draws(text: str, least: float = 1) -> list[float]:
    distribution = Distribution.parse(text, "--input-len", least)
    rng = np.random.default_rng(0)
    return [distribution.draw(rng) for _ in range(4000)]


def test_a_number_is_always_itself() -> None:
    assert set(draws("512")) == {512}
    assert set(draws("2.5", least=0)) == {2.5}
    assert set(draws("0", least=0)) == {0}


def test_a_uniform_one_fills_its_range() -> None:
    numbers = draws("uniform:256,1024")
    assert 256 <= min(numbers) < 260
    assert 1020 < max(numbers) <= 1024


def test_a_normal_one_has_its_mean_and_deviation_and_no_lengths_below_one() -> None:
    numbers = draws("normal:512,64")
    assert np.mean(numbers) == pytest.approx(512, rel=0.01)
    assert np.std(numbers) == pytest.approx(64, rel=0.05)
    assert min(draws("normal:5,50")) == 1


def test_a_lognormal_one_has_its_median_and_sigma() -> None:
    numbers = draws("lognormal:512,0.5")
    assert np.median(numbers) == pytest.approx(512, rel=0.03)
    assert np.std(np.log(numbers)) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("text", ["512", "uniform:256,1024", "normal:512,64", "lognormal:512,0.5"])
def test_the_mean_is_that_of_what_is_drawn(text: str) -> None:
    assert np.mean(draws(text)) == pytest.approx(Distribution.parse(text, "").mean, rel=0.03)


@given(
    st.sampled_from(["normal", "lognormal"]),
    st.floats(1, 1e7),
    st.floats(0, 1e7),
    st.integers(0, 100),
)
def test_every_draw_is_a_possible_number_of_tokens(kind: str, first: float, second: float, seed: int) -> None:
    tokens = Distribution.parse(f"{kind}:{first},{second}", "").tokens(np.random.default_rng(seed))
    assert 1 <= tokens <= 10_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "0",
        "-5",
        "nan",
        "inf",
        "1e9",
        "1,2",
        "constant:5",
        "uniform:256",
        "uniform:1,2,3",
        "uniform:0,5",
        "uniform:9,5",
        "uniform:a,b",
        "normal:512",
        "normal:512,-1",
        "normal:-512,1",
        "lognormal:0,1",
        "poisson:5,5",
        "normal:",
        ":",
    ],
)
def test_anything_else_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-len"):
        Distribution.parse(text, "--output-len")


def test_a_pause_may_be_zero_but_the_median_of_a_lognormal_one_may_not() -> None:
    assert Distribution.parse("uniform:0,3", "--think-s", least=0).mean == 1.5
    with pytest.raises(ConfigError, match="--think-s"):
        Distribution.parse("lognormal:0,1", "--think-s", least=0)
    assert math.isclose(Distribution.parse("lognormal:0.5,0", "--think-s", least=0).mean, 0.5)

"""Noise and drift of step times."""

from statistics import fmean, pstdev

import pytest

from sim.device.pace import DRIFT_S, Pace

TIMES = [number * 0.0173 for number in range(20_000)]


def test_without_noise_and_drift_every_step_takes_its_time() -> None:
    assert {Pace()(time_s) for time_s in TIMES} == {1.0}


def test_noise_has_the_given_spread_and_no_bias() -> None:
    factors = [Pace(noise=0.1, seed=3)(time_s) for time_s in TIMES[:1]] + list(map(Pace(noise=0.1, seed=3), TIMES))
    assert fmean(factors) == pytest.approx(1.0, abs=0.01)
    assert pstdev(factors) == pytest.approx(0.1, rel=0.1)


def test_a_step_takes_the_same_time_whatever_was_asked_before() -> None:
    forwards, backwards = Pace(0.1, 0.2, seed=5), Pace(0.1, 0.2, seed=5)
    assert list(map(forwards, TIMES)) == list(map(backwards, reversed(TIMES)))[::-1]
    assert list(map(Pace(0.1, 0.2, seed=6), TIMES)) != list(map(forwards, TIMES))


def test_drift_is_slow() -> None:
    pace = Pace(drift=0.2, seed=1)
    factors = [pace(second) for second in range(20_000)]
    assert pstdev(factors) == pytest.approx(0.2, rel=0.2)
    near, far = (
        fmean(abs(a - b) for a, b in zip(factors, factors[step:], strict=False)) for step in (1, int(4 * DRIFT_S))
    )
    assert near < far / 3

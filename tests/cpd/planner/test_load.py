from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.planner.load import MEMORY_S, MIN_REQUESTS, LoadMeter


def test_rates_and_mean_lengths_are_measured_by_class() -> None:
    meter = LoadMeter(100.0, expected_output=256)
    for number in range(1000):
        now = 100.0 + 0.1 * number
        key = meter.arrived(2_000, 200, 1_000, now)
        meter.answered(key, 300)
        if number % 2:
            meter.answered(meter.arrived(20_000, 18_000, 20_000, now), 100)
    short, long = sorted(meter.demands(200.0), key=lambda one: one.prompt_tokens)
    assert short.rate == pytest.approx(10.0, rel=0.02)
    assert long.rate == pytest.approx(5.0, rel=0.02)
    assert astuple(short)[1:] == pytest.approx((200, 1_000, 2_000, 300), rel=0.02)
    assert astuple(long)[1:] == pytest.approx((18_000, 20_000, 20_000, 100), rel=0.1)


def test_a_rate_that_rises_evenly_is_followed_without_lag() -> None:
    meter, now, rate = LoadMeter(0.0, expected_output=256), 0.0, 20.0
    while now < 300:
        rate = 20.0 + 0.2 * now
        now += 1 / rate
        meter.arrived(2_000, 200, 1_000, now)
    (one,) = meter.demands(now)
    assert one.rate == pytest.approx(rate, rel=0.03)


def test_a_load_that_ended_is_forgotten() -> None:
    meter = LoadMeter(0.0, expected_output=256)
    for number in range(1000):
        meter.arrived(2_000, 200, 1_000, 0.01 * number)
    assert meter.seen(10.0).recent == pytest.approx(1000, rel=0.2)
    assert meter.seen(10.0 + 3 * MEMORY_S).recent < 60
    assert not meter.demands(10.0 + 20 * MEMORY_S)


def test_a_slow_load_is_enough_after_a_while_and_until_it_ends() -> None:
    meter, enough = LoadMeter(0.0, expected_output=256), list[bool]()
    for number in range(2 * MIN_REQUESTS):
        meter.arrived(60_000, 60_000, 60_000, 4.0 * number)
        enough.append(meter.seen(4.0 * number).enough)
    assert enough == [number >= MIN_REQUESTS for number in range(1, 2 * MIN_REQUESTS + 1)]
    assert not meter.seen(4.0 * 2 * MIN_REQUESTS + MEMORY_S).enough


def test_answers_have_the_expected_length_until_there_are_some() -> None:
    meter = LoadMeter(0.0, expected_output=40)
    key = meter.arrived(2_000, 200, 1_000, 1.0)
    assert meter.demands(1.0)[0].output_tokens == pytest.approx(40)
    for _ in range(500):
        meter.answered(key, 300)
    assert meter.demands(1.0)[0].output_tokens == pytest.approx(300, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(-5, 50_000), st.integers(-5, 50_000)), max_size=50))
def test_any_lengths_can_be_counted(requests: list[tuple[int, int, int]]) -> None:
    meter = LoadMeter(0.0, expected_output=256)
    for prompt, local, remote in requests:
        meter.arrived(prompt, local, remote, 1.0)
    demands = meter.demands(2.0)
    assert sum(one.rate for one in demands) * 2.0 == pytest.approx(len(requests), rel=0.05)
    assert all(1 <= one.local_tokens <= one.remote_tokens for one in demands)

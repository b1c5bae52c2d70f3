from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.interference.gaps import gaps_ms, is_steady, mean_gap_ms, timeline

times = st.floats(0.0, 10.0)
streams = st.lists(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30).map(lambda gaps: list(accumulate(gaps))), max_size=4
)


def regular(gap_s: float, count: int, start_s: float = 0.0) -> list[float]:
    return [start_s + gap_s * index for index in range(count)]


@given(start=times, length=st.floats(0.001, 3.0))
def test_the_mean_of_equal_gaps_is_the_gap_wherever_a_stretch_begins(start: float, length: float) -> None:
    both = [regular(0.01, 2000), regular(0.01, 2000, 0.003)]
    assert mean_gap_ms(both, start, start + length) == pytest.approx(10)


@given(streams, times, times, times)
def test_the_mean_lies_between_the_shortest_and_the_longest_gap(
    stamps: list[list[float]], start: float, middle: float, end: float
) -> None:
    start, _, end = sorted((start, middle, end))
    mean, gaps = mean_gap_ms(stamps, start, end), gaps_ms(stamps, start, end)
    if mean is not None:
        assert gaps.min() * 0.999 <= mean <= gaps.max() * 1.001


@given(streams, times, times, times)
def test_gaps_add_up_over_neighbouring_stretches(
    stamps: list[list[float]], start: float, middle: float, end: float
) -> None:
    start, middle, end = sorted((start, middle, end))

    def covered_s(low: float, high: float) -> float:
        return sum(max(0.0, min(high, s[-1]) - max(low, s[0])) for s in stamps if len(s) > 1)

    def gaps(low: float, high: float) -> float:
        mean = mean_gap_ms(stamps, low, high)
        return covered_s(low, high) / mean * 1e3 if mean else 0.0

    assert gaps(start, end) == pytest.approx(gaps(start, middle) + gaps(middle, end), abs=1e-6)


def test_a_stretch_within_one_gap_has_that_gap() -> None:
    stamps = [[0.0, 0.01, 0.05, 0.06]]
    assert mean_gap_ms(stamps, 0.02, 0.03) == pytest.approx(40)
    assert gaps_ms(stamps, 0.02, 0.03).tolist() == pytest.approx([40])


def test_a_stalled_burst_weighs_with_its_time() -> None:
    assert mean_gap_ms([[0.0, 0.01, 0.05, 0.06]], 0.0, 0.06) == pytest.approx(20)
    assert mean_gap_ms([[0.0, 0.01, 0.05, 0.06]], 0.005, 0.05) == pytest.approx(30)


def test_nothing_decoded_is_no_mean() -> None:
    assert mean_gap_ms([], 0, 1) is None
    assert mean_gap_ms([[0.5], []], 0, 1) is None
    assert mean_gap_ms([[2.0, 3.0]], 0, 1) is None
    assert gaps_ms([[2.0, 3.0]], 0, 1).size == 0
    assert not is_steady([[2.0, 3.0]], 0, 1, 1.1)


def test_decoding_that_slows_down_is_not_steady() -> None:
    slowing = [*regular(0.01, 50), *regular(0.02, 50, 0.5)]
    assert is_steady([slowing], 0.0, 0.4, 1.1)
    assert not is_steady([slowing], 0.25, 0.75, 1.1)


def test_the_timeline_shows_when_gaps_were_long() -> None:
    stamps = [[*regular(0.01, 11), *regular(0.01, 10, 0.2)]]
    points = timeline(stamps, 0.0, 0.29, 0.1, 29)
    assert points[0] == (-95.0, 10.0)
    assert {round(at_ms) for at_ms, gap_ms in points if gap_ms > 50} == set(range(5, 100, 10))

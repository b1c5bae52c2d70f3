from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sweep.search import MaxRate, is_enough, share_interval


@given(st.floats(0.01, 1000), st.floats(0.1, 100), st.floats(0.01, 0.5))
def test_the_search_brackets_the_capacity_of_a_server(capacity: float, start: float, precision: float) -> None:
    search = MaxRate(start, precision)
    tried = []
    while (rate := search.next()) is not None:
        tried.append(rate)
        search.tell(rate, rate <= capacity)
        assert len(tried) < 50
    if capacity < start / 256:
        assert search.met is None
    else:
        assert search.met is not None
        assert search.missed is not None
        assert search.met <= capacity < search.missed
        assert search.missed <= search.met * (1 + precision)
    assert len(set(tried)) == len(tried)


def test_the_search_doubles_until_a_rate_is_too_much() -> None:
    search = MaxRate(start=2, precision=0.1)
    tried = []
    while (rate := search.next()) is not None and search.missed is None:
        tried.append(rate)
        search.tell(rate, rate < 10)
    assert tried == [2, 4, 8, 16]


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_of_a_share_holds_the_share(good: int, more: int) -> None:
    low, high = share_interval(good / (good + more), good + more)
    assert 0 <= low <= good / (good + more) + 1e-9
    assert good / (good + more) - 1e-9 <= high <= 1


def test_the_interval_is_wilsons() -> None:
    assert share_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)


def test_intervals_become_narrower_with_more_requests() -> None:
    widths = [high - low for low, high in (share_interval(0.9, 10 * n) for n in (1, 10, 100))]
    assert all(before > after for before, after in pairwise(widths))


def test_a_target_is_met_or_missed_only_if_there_are_enough_requests_to_tell() -> None:
    assert is_enough(share_interval(1.0, 1000), 0.99) is True
    assert is_enough(share_interval(1.0, 10), 0.99) is None
    assert is_enough(share_interval(0.5, 10), 0.99) is False
    assert is_enough(share_interval(0.0, 0), 0.99) is None

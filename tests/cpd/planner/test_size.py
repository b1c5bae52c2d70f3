"""How many workers a load needs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.planner.capacity import CapacityModel, Demand
from cpd.planner.planner import MIN_REQUESTS
from cpd.planner.size import CALM_S, GROW, MISSED, SPARE, Size, Sizer
from tests.cpd.planner.fleets import CHATS, LONG, TARGETS, demands, fleet

LEAST, MOST = 2, 32
MANY = 10.0 * MIN_REQUESTS


def sizer() -> Sizer:
    return Sizer(TARGETS, LEAST, MOST, began=0.0)


def size(one: Sizer, load: Sequence[Demand], count: int, now: float, requests: float = MANY) -> Size:
    return one.size(load, requests, fleet(count), 0, now)


def good_share(load: Sequence[Demand], count: int, scale: float) -> float:
    model = CapacityModel(load, fleet(count), TARGETS)
    return max(one.good_share for one in model.predict(range(count), scale))


@pytest.mark.parametrize("load", [replace(CHATS, rate=160.0), replace(LONG, rate=8.0)])
def test_workers_that_are_too_few_get_as_many_more_as_are_enough(load: Demand) -> None:
    assert good_share([load], 4, GROW) < 1 - MISSED
    wanted = size(sizer(), [load], 4, 0.0).workers
    assert 4 < wanted < MOST
    assert good_share([load], wanted, GROW) >= 1 - MISSED


def test_a_few_requests_are_too_few_to_grow_by() -> None:
    assert size(sizer(), [replace(CHATS, rate=160.0)], 4, 0.0, requests=MIN_REQUESTS - 1).workers == 4


def test_workers_go_only_when_fewer_were_enough_for_a_while() -> None:
    one, load = sizer(), [replace(CHATS, rate=20.0)]
    assert good_share(load, 8, SPARE) >= 1 - MISSED
    assert size(one, load, 16, 0.0).workers == 16
    assert size(one, [replace(CHATS, rate=80.0)], 16, 100.0).workers == 16
    busiest = size(one, load, 16, CALM_S).workers
    calm = size(one, load, 16, 101.0 + CALM_S).workers
    assert calm < busiest < 16, "the most that was needed in this time"
    assert good_share(load, calm, SPARE) >= 1 - MISSED


def test_without_requests_the_fewest_workers_are_left() -> None:
    one = sizer()
    assert size(one, [], 16, 0.0, requests=0.0).workers == 16
    assert size(one, [], 16, CALM_S, requests=0.0).workers == LEAST


def test_a_number_outside_the_bounds_changes_at_once() -> None:
    assert size(sizer(), [], 1, 0.0, requests=0.0).workers == LEAST
    assert size(sizer(), [replace(CHATS, rate=160.0)], 40, 0.0).workers == MOST


def test_no_number_is_enough_for_some_loads() -> None:
    assert size(sizer(), [replace(CHATS, rate=5_000.0)], 16, 0.0).workers == MOST


@settings(max_examples=30, deadline=None)
@given(st.lists(demands(), max_size=4), st.integers(LEAST, MOST))
def test_a_constant_load_changes_the_number_at_most_once(load: list[Demand], count: int) -> None:
    one, numbers = sizer(), [count]
    for step in range(8):
        load_now = [replace(each, remote_tokens=each.local_tokens) for each in load]  # nothing to find in caches
        numbers.append(size(one, load_now, numbers[-1], 0.5 * CALM_S * step).workers)
        assert LEAST <= numbers[-1] <= MOST
    assert sum(later != earlier for earlier, later in pairwise(numbers)) <= 1

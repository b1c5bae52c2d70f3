"""How many workers a load needs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.planner.capacity import CapacityModel, Demand
from cpd.planner.load import MIN_REQUESTS, Seen
from cpd.planner.size import CALM_S, GROW, MISSED, SPARE, Size, Sizer
from tests.cpd.planner.fleets import CHATS, LONG, MANY, TARGETS, demands, fleet

LEAST, MOST = 2, 32
NONE = Seen(0, 0.0)


def sizer() -> Sizer:
    return Sizer(LEAST, MOST, began=0.0)


def size(one: Sizer, load: Sequence[Demand], count: int, now: float, seen: Seen = MANY) -> Size:
    return one.size(load, seen, fleet(count), TARGETS, 0, now)


def enough(load: Sequence[Demand], count: int, scale: float) -> bool:
    model = CapacityModel(load, fleet(count), TARGETS)
    good, most = (max(one.good_per_s for one in model.predict(range(n), scale, n)) for n in (count, MOST))
    return good >= (1 - MISSED) * most


@pytest.mark.parametrize("load", [replace(CHATS, rate=160.0), replace(LONG, rate=8.0)])
def test_workers_that_are_too_few_get_as_many_more_as_are_enough(load: Demand) -> None:
    assert not enough([load], 4, GROW)
    wanted = size(sizer(), [load], 4, 0.0).workers
    assert 4 < wanted < MOST
    assert enough([load], wanted, GROW)


def test_a_few_requests_are_too_few_to_grow_by() -> None:
    assert (
        size(sizer(), [replace(CHATS, rate=160.0)], 4, 0.0, seen=Seen(MIN_REQUESTS - 1, MIN_REQUESTS - 1.0)).workers
        == 4
    )


def test_workers_go_only_when_fewer_were_enough_for_a_while() -> None:
    one, load = sizer(), [replace(CHATS, rate=20.0)]
    assert enough(load, 8, SPARE)
    assert size(one, load, 16, 0.0).workers == 16
    assert size(one, [replace(CHATS, rate=80.0)], 16, 100.0).workers == 16
    busiest = size(one, load, 16, CALM_S).workers
    calm = size(one, load, 16, 101.0 + CALM_S).workers
    assert calm < busiest < 16, "the most that was needed in this time"
    assert enough(load, calm, SPARE)


def test_without_requests_the_fewest_workers_are_left() -> None:
    one = sizer()
    assert size(one, [], 16, 0.0, seen=NONE).workers == 16
    assert size(one, [], 16, CALM_S, seen=NONE).workers == LEAST


def test_a_number_outside_the_bounds_changes_at_once() -> None:
    assert size(sizer(), [], 1, 0.0, seen=NONE).workers == LEAST
    assert size(sizer(), [replace(CHATS, rate=160.0)], 40, 0.0).workers == MOST


def test_a_load_that_is_too_much_for_all_gets_all() -> None:
    assert size(sizer(), [replace(CHATS, rate=5_000.0)], 16, 0.0).workers == MOST


def test_prompts_that_are_late_on_idle_workers_need_no_more_workers() -> None:
    late = Demand(rate=0.1, local_tokens=120_000, remote_tokens=120_000, prompt_tokens=120_000, output_tokens=100)
    assert size(sizer(), [late], 4, 0.0).workers == 4
    chats = replace(CHATS, rate=20.0)
    assert size(sizer(), [late, chats], 4, 0.0) == size(sizer(), [chats], 4, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(demands(), max_size=4), st.integers(LEAST, MOST))
def test_a_constant_load_changes_the_number_at_most_once(load: list[Demand], count: int) -> None:
    one, numbers = sizer(), [count]
    for step in range(8):
        load_now = [replace(each, remote_tokens=each.local_tokens) for each in load]  # nothing to find in caches
        numbers.append(size(one, load_now, numbers[-1], 0.5 * CALM_S * step).workers)
        assert LEAST <= numbers[-1] <= MOST
    assert sum(later != earlier for earlier, later in pairwise(numbers)) <= 1

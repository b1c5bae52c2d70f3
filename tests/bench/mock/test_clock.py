import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mock.clock import WorkClock


def test_work_goes_on_with_the_wall_clock_unless_frozen() -> None:
    clock = WorkClock()
    assert clock.work(5.0) == 5.0
    assert clock.wall(5.0) == 5.0


def test_during_a_freeze_work_stands_still_and_afterwards_it_goes_on_where_it_was() -> None:
    clock = WorkClock()
    clock.freeze(10.0, 2.0)
    assert [clock.work(now) for now in (10.0, 11.0, 12.0, 13.0)] == [10.0, 10.0, 10.0, 11.0]
    assert clock.wall(11.0) == 13.0


def test_freezes_that_overlap_follow_one_another() -> None:
    clock = WorkClock()
    clock.freeze(10.0, 2.0)
    clock.freeze(11.0, 3.0)
    assert clock.work(14.9) == 10.0
    assert clock.work(16.0) == 11.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10))))
def test_work_never_goes_back_and_loses_exactly_the_frozen_time(freezes: list[tuple[float, float]]) -> None:
    clock = WorkClock()
    now = work = 0.0
    for pause, seconds in freezes:
        now += pause
        assert clock.work(now) >= work - 1e-9
        work = clock.work(now)
        clock.freeze(now, seconds)
        assert clock.work(now) == pytest.approx(work)
    later = now + sum(seconds for _, seconds in freezes)
    assert clock.work(later) == pytest.approx(later - sum(seconds for _, seconds in freezes), abs=1e-6)
    assert clock.wall(clock.work(later)) == pytest.approx(later)

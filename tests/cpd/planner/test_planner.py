from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.planner.capacity import CapacityModel, Demand, Prediction
from cpd.planner.load import MIN_RECENT, MIN_REQUESTS, Seen
from cpd.planner.planner import MIN_LOSS, SETTLE_S, Plan, Planner
from tests.cpd.planner.fleets import CHATS, LONG, MANY, TARGETS, demands, fleet


def plan(load: list[Demand], current: int, planner: Planner | None = None, now: float = 0.0) -> Plan:
    """What is decided, and carried out."""
    planner = planner or Planner(-SETTLE_S)
    one = planner.plan(load, MANY, fleet(), TARGETS, current, now)
    if one.changes:
        planner.changed(now)
    return one


@pytest.mark.parametrize("current", [4, 8, 11, 15])
def test_without_long_prompts_prefill_workers_become_combined(current: int) -> None:
    assert plan([CHATS], current).prefill_workers == 0


def test_the_answer_depends_on_the_mix_and_not_on_the_rate() -> None:
    found = {plan([replace(LONG, rate=rate)], 0).prefill_workers for rate in (1.0, 5.0, 10.0, 20.0)}
    assert max(found) - min(found) <= 2
    assert min(found) >= 4


def test_a_change_says_what_it_is_based_on() -> None:
    one = plan([CHATS], 8)
    good = {each.prefill_workers: each.good_per_s for each in one.predictions}
    assert set(good) == set(range(16))
    assert good[one.prefill_workers] >= (1 - MIN_LOSS) * max(good.values())
    assert good[8] < (1 - MIN_LOSS) * good[one.prefill_workers]
    assert f"by prefill workers: {good[0]:.1f} with 0, {good[8]:.1f} with 8" in one.reason


def test_a_number_that_is_right_is_not_compared_with_itself() -> None:
    one = plan([CHATS], 0)
    best = max(each.good_per_s for each in one.predictions)
    assert not one.changes
    good = one.predictions[0].good_per_s
    assert one.reason == f"good requests/s by prefill workers: {good:.1f} with 0, at most {best:.1f} with others"


def test_few_requests_change_nothing() -> None:
    for seen in (Seen(MIN_REQUESTS - 1, MIN_REQUESTS - 1.0), Seen(MIN_REQUESTS, MIN_RECENT - 1.0)):
        one = Planner(-SETTLE_S).plan([CHATS], seen, fleet(), TARGETS, 8, 0.0)
        assert not one.changes
        assert one.reason == f"too few requests to plan by: {seen.total} so far, {seen.recent:.0f} of them recent"
    assert Planner(-SETTLE_S).plan([CHATS], Seen(MIN_REQUESTS, MIN_RECENT), fleet(), TARGETS, 8, 0.0).changes
    assert not Planner(-SETTLE_S).plan([], MANY, fleet(), TARGETS, 8, 0.0).changes


def test_what_was_not_carried_out_raises_no_bar() -> None:
    planner = Planner(-SETTLE_S)
    decided = {planner.plan([CHATS], MANY, fleet(), TARGETS, 8, 10.0 * step).prefill_workers for step in range(10)}
    assert decided == {0}


def test_nothing_changes_before_the_load_has_been_measured_for_some_time() -> None:
    planner = Planner(began=100.0)
    early = plan([CHATS], 8, planner, 99.0 + SETTLE_S)
    assert not early.changes
    assert "measured for less than 20 s" in early.reason
    assert plan([CHATS], 8, planner, 100.0 + SETTLE_S).changes


def test_a_change_settles_before_the_next() -> None:
    planner = Planner(-SETTLE_S)
    assert plan([CHATS], 8, planner, 0.0).changes
    assert not plan([replace(LONG, rate=20.0)], 0, planner, SETTLE_S - 1).changes
    assert plan([replace(LONG, rate=20.0)], 0, planner, SETTLE_S + 1).changes


def test_roles_change_at_most_seven_times_in_an_hour_whatever_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    best = 0

    class Extreme(CapacityModel):
        def predict(self, prefill_workers: Sequence[int], scale: float = 1.0, workers: int = 0) -> list[Prediction]:
            good = [float(number == best) for number in prefill_workers]
            return [Prediction(*one, 1, 0, 0, 0) for one in zip(prefill_workers, good, strict=True)]

    monkeypatch.setattr("cpd.planner.planner.CapacityModel", Extreme)
    planner, current, changes = Planner(-SETTLE_S), 0, list[float]()
    for step in range(200):
        best, now = 8 - best, 60.0 * step
        one = plan([CHATS], current, planner, now)
        current = one.prefill_workers
        changes += [now] * one.changes
    assert len(changes) > 20
    assert all(later - first >= 3600 for first, later in zip(changes, changes[7:], strict=False))


def test_of_numbers_that_are_about_as_good_the_smallest_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Equal(CapacityModel):
        def predict(self, prefill_workers: Sequence[int], scale: float = 1.0, workers: int = 0) -> list[Prediction]:
            return [Prediction(number, 0.8 + number / 1e4, 0.8, 0, 0, 0) for number in prefill_workers]

    monkeypatch.setattr("cpd.planner.planner.CapacityModel", Equal)
    planner = Planner(-SETTLE_S)
    assert plan([CHATS], 4, planner).prefill_workers == 0
    assert not plan([CHATS], 4, planner, SETTLE_S + 1).changes
    assert not plan([CHATS], 0).changes


def test_each_change_raises_the_bar_for_the_next() -> None:
    planner, long = Planner(-SETTLE_S), [replace(LONG, rate=22.0)]
    for number in range(7):
        assert plan([CHATS], 15, planner, 100.0 * number).changes
    one = plan(long, 0, planner, 1000.0)
    assert not one.changes
    assert "7 in the last hour" in one.reason
    assert plan(long, 0, planner, 600.0 + 3600).changes


def test_a_single_worker_remains_combined() -> None:
    assert Planner(-SETTLE_S).plan([LONG], MANY, fleet(1), TARGETS, 0, 0.0).prefill_workers == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(demands(), min_size=1, max_size=6), st.integers(1, 16), st.floats(0, 1.2), st.data())
def test_a_constant_load_comes_to_rest(
    load: list[Demand], workers: int, elasticity: float, data: st.DataObject
) -> None:
    # what is found in caches changes with the number of combined workers, and not as the model takes it to
    start = current = data.draw(st.integers(0, workers - 1))
    planner, changes = Planner(-SETTLE_S), list[int]()
    for step in range(20):
        found = ((workers - current) / workers) ** elasticity
        measured = [
            replace(one, local_tokens=one.remote_tokens - found * (one.remote_tokens - one.local_tokens))
            for one in load
        ]
        one = planner.plan(measured, MANY, fleet(workers), TARGETS, current, 100.0 * step)
        assert 0 <= one.prefill_workers < workers
        if one.changes:
            planner.changed(100.0 * step)
            changes.append(step)
        current = one.prefill_workers
    assert len(changes) <= 7
    assert not changes or changes[-1] < 7, f"still changing, from {start}"


@settings(max_examples=40, deadline=None)
@given(st.lists(demands(), min_size=1, max_size=6), st.integers(1, 16), st.data())
def test_without_caches_a_constant_load_changes_roles_at_most_once(
    load: list[Demand], workers: int, data: st.DataObject
) -> None:
    load = [replace(one, remote_tokens=one.local_tokens) for one in load]
    current = data.draw(st.integers(0, workers - 1))
    planner, changes = Planner(-SETTLE_S), 0
    for step in range(4):
        one = planner.plan(load, MANY, fleet(workers), TARGETS, current, 100.0 * step)
        if one.changes:
            planner.changed(100.0 * step)
        changes += one.changes
        current = one.prefill_workers
    assert changes <= 1

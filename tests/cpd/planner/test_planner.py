from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.planner.capacity import Demand
from cpd.planner.planner import CHANGES_PER_HOUR, MIN_GAIN, MIN_REQUESTS, NEARLY, SETTLE_S, Plan, Planner
from tests.cpd.planner.fleets import CHATS, LONG, TARGETS, demands, fleet

MANY = 10.0 * MIN_REQUESTS


def plan(load: list[Demand], current: int, planner: Planner | None = None, now: float = 0.0) -> Plan:
    return (planner or Planner(TARGETS)).plan(load, MANY, fleet(), current, now)


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
    assert good[one.prefill_workers] >= (1 - NEARLY) * max(good.values())
    assert good[one.prefill_workers] >= (1 + MIN_GAIN) * good[8]
    assert f"{good[0]:.1f} good requests/s with 0 prefill workers, {good[8]:.1f} with 8" in one.reason


def test_few_requests_change_nothing() -> None:
    one = Planner(TARGETS).plan([CHATS], MIN_REQUESTS - 1, fleet(), 8, 0.0)
    assert not one.changes
    assert "too few" in one.reason
    assert not Planner(TARGETS).plan([], MANY, fleet(), 8, 0.0).changes


def test_a_change_settles_before_the_next() -> None:
    planner = Planner(TARGETS)
    assert plan([CHATS], 8, planner, 0.0).changes
    assert not plan([replace(LONG, rate=20.0)], 0, planner, SETTLE_S - 1).changes
    assert plan([replace(LONG, rate=20.0)], 0, planner, SETTLE_S + 1).changes


def test_there_are_only_some_changes_in_an_hour() -> None:
    planner, current, changes = Planner(TARGETS), 0, list[float]()
    for step in range(100):
        now = 60.0 * step
        one = plan([CHATS] if step % 2 else [replace(LONG, rate=20.0)], current, planner, now)
        current = one.prefill_workers
        changes += [now] * one.changes
    assert len(changes) > CHANGES_PER_HOUR
    assert all(later - first >= 3600 for first, later in zip(changes, changes[CHANGES_PER_HOUR:], strict=False))


def test_a_single_worker_remains_combined() -> None:
    assert Planner(TARGETS).plan([LONG], MANY, fleet(1), 0, 0.0).prefill_workers == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(demands(), min_size=1, max_size=6), st.integers(1, 16), st.data())
def test_a_constant_load_changes_roles_at_most_once(load: list[Demand], workers: int, data: st.DataObject) -> None:
    # nothing is cached on some workers only: what they find would be measured anew after a change
    load = [replace(one, remote_tokens=one.local_tokens) for one in load]
    current = data.draw(st.integers(0, workers - 1))
    planner, changes = Planner(TARGETS), 0
    for step in range(4):
        one = planner.plan(load, MANY, fleet(workers), current, 100.0 * step)
        assert 0 <= one.prefill_workers < workers
        changes += one.changes
        current = one.prefill_workers
    assert changes <= 1

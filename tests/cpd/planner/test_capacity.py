from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.planner.capacity import CapacityModel, Demand
from tests.cpd.planner.fleets import CHATS, LONG, TARGETS, demands, fleet


def test_an_idle_cluster_serves_everything() -> None:
    (one,) = CapacityModel([CHATS], fleet(), TARGETS).predict([0])
    assert one.good_share == pytest.approx(1.0, abs=1e-3)
    assert one.good_per_s == pytest.approx(CHATS.rate, rel=1e-3)
    assert one.prefill_busy == 0


def test_each_prefill_worker_costs_chats_its_streams() -> None:
    model = CapacityModel([replace(CHATS, rate=2_000.0, remote_tokens=250)], fleet(), TARGETS)
    good = [one.good_per_s for one in model.predict(range(16))]
    assert good == sorted(good, reverse=True)
    assert 0.5 * good[0] < good[8] < 0.6 * good[0]  # prefill workers take over the prompts, but no streams


def test_fewer_combined_workers_find_less_in_their_caches() -> None:
    load = [replace(CHATS, rate=300.0, local_tokens=1_000, remote_tokens=remote) for remote in (1_000, 2_000)]
    shared, own = (CapacityModel([one], fleet(), TARGETS).predict([0, 4]) for one in load)
    assert shared[0] == own[0]
    assert own[1].combined_busy > shared[1].combined_busy


def test_predictions_do_not_depend_on_the_number_with_which_caches_were_measured() -> None:
    # with 0 prefill workers, three quarters of the prompts are found; with 8, half of that: those are other requests
    hit, miss = (Demand(rate, local, 16_000, 16_000, 150) for rate, local in ((30.0, 1_000), (10.0, 16_000)))
    fewer = [replace(hit, rate=15.0), replace(miss, rate=25.0)]
    all_combined = CapacityModel([hit, miss], fleet(), TARGETS, current=0).predict(range(0, 16, 4))
    half = CapacityModel(fewer, fleet(), TARGETS, current=8).predict(range(0, 16, 4))
    for one, other in zip(all_combined, half, strict=True):
        assert one.good_per_s == pytest.approx(other.good_per_s, rel=0.06)
    assert all_combined[0].good_per_s > 1.01 * all_combined[2].good_per_s
    assert half[0].good_per_s > 1.01 * half[2].good_per_s


def test_prompts_that_take_as_long_are_given_up_in_one_order_whatever_number_was_measured() -> None:
    short, long = (Demand(rate, 1, 1, 467, answer) for rate, answer in ((180.0, 1), (188.0, 836)))
    with_0, with_1 = (CapacityModel([short, long], fleet(4), TARGETS, current).predict(range(4)) for current in (0, 1))
    assert with_0[1].good_share < 0.6
    assert [one.good_per_s for one in with_0] == pytest.approx([one.good_per_s for one in with_1])


def test_long_prompts_with_short_answers_are_computed_best_by_prefill_workers() -> None:
    model = CapacityModel([replace(LONG, rate=22.0)], fleet(), TARGETS)
    good = [one.good_per_s for one in model.predict(range(16))]
    best = good.index(max(good))
    assert 4 <= best <= 12
    assert good[best] > 1.02 * good[0]
    assert good[15] < 0.5 * good[best]  # one worker can't decode for all


def test_prompts_that_take_longer_than_the_target_are_late_everywhere() -> None:
    endless = Demand(0.1, 200_000, 200_000, 200_000, 10)
    for one in CapacityModel([endless], fleet(), TARGETS).predict(range(16)):
        assert one.good_share < 0.01


def test_slower_workers_serve_less() -> None:
    load = [replace(LONG, rate=22.0)]
    slow = replace(fleet(), slowdowns=[1.3])
    (good,), (less,) = (CapacityModel(load, one, TARGETS).predict([4]) for one in (fleet(), slow))
    assert less.good_per_s < 0.9 * good.good_per_s


@settings(max_examples=60, deadline=None)
@given(st.lists(demands(), min_size=1, max_size=6), st.integers(1, 20), st.floats(0.1, 10))
def test_figures_are_possible(load: list[Demand], workers: int, scale: float) -> None:
    rate = scale * sum(one.rate for one in load)
    found = CapacityModel(load, fleet(workers), TARGETS).predict(range(workers), scale)
    assert [one.prefill_workers for one in found] == list(range(workers))
    for one in found:
        assert 0 <= one.good_per_s <= rate * (1 + 1e-9)
        assert one.good_per_s == pytest.approx(one.good_share * rate)
        assert 0 <= one.prefill_busy <= 1 + 1e-6
        assert one.combined_busy >= 0
        assert 0 <= one.streams <= 256

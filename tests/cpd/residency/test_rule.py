"""Each line of the rule (cpd/residency/rule.py)."""

from dataclasses import replace

import pytest

from cpd.residency.rule import Rule
from cpd.residency.snapshot import (
    Decision,
    Device,
    Drain,
    Fail,
    Fairness,
    Intent,
    Model,
    ModelState,
    Occupant,
    Sleep,
    SleepSettings,
    Wake,
)
from tests.cpd.residency.ledger import Ledger

GIB = 1 << 30


def model(name: str, gib: int, *, idle_timeout_s: float = 0.0, **fairness: float | bool) -> Model:
    return Model(name, gib * GIB, Fairness(**fairness), SleepSettings(idle_timeout_s=idle_timeout_s), 1.0, 0.1)


A, B, C, D = (model(name, 40) for name in "abcd")
POPULAR = model("popular", 40, popular=True)


def serving(one: Model, since_s: float = 0.0, last_access_s: float = 0.0, running: int = 1) -> Occupant:
    return Occupant(one, ModelState.SERVING, since_s, last_access_s, running)


def intent(one: Model, since_s: float) -> Intent:
    return Intent(one, since_s, latest_s=1e9, wake_s=one.wake_s)


def decide(occupants: list[Occupant], intents: list[Intent], now: float) -> Decision:
    models = [one.model for one in occupants] + [one.model for one in intents]
    return Rule().decide(Device(80 * GIB, models, occupants, intents), now)


def test_a_model_that_fits_beside_those_awake_wakes_at_once() -> None:
    assert decide([serving(A)], [intent(B, 100)], 100).actions == [Wake("b")]


def test_one_model_loads_at_a_time() -> None:
    assert decide([], [intent(A, 100), intent(B, 100)], 100).actions == [Wake("a")]
    assert decide([Occupant(A, ModelState.WAKING, 100)], [intent(B, 100)], 100.5).actions == []


def test_busy_models_stay_until_max_wait_time_is_over() -> None:
    occupants = [serving(A), serving(B)]
    early = decide(occupants, [intent(C, 100)], 104.9)
    assert (early.actions, early.check_at_s) == ([], 105)
    assert decide(occupants, [intent(C, 100)], 105).actions == [Drain("a", "c")]


def test_meanwhile_others_may_go_to_sleep_by_themselves() -> None:
    idle = replace(serving(model("a", 40, idle_timeout_s=3), 95, 100, running=0))
    now = decide([idle, serving(B)], [intent(C, 101)], 101)
    assert (now.actions, now.check_at_s) == ([], 103)
    assert decide([idle, serving(B)], [intent(C, 101)], 103).actions == [Sleep("a")]


def test_a_model_without_requests_goes_to_sleep_after_its_idle_timeout_only() -> None:
    assert decide([serving(model("a", 40, idle_timeout_s=60), 0, 50, running=0)], [], 110).actions == [Sleep("a")]
    assert decide([serving(model("a", 40, idle_timeout_s=60), 0, 50)], [], 110).actions == []
    assert decide([serving(A, 0, 50, running=0)], [], 1e6).actions == []


def test_an_idle_model_past_its_min_runtime_is_displaced_at_once() -> None:
    assert decide([serving(A), serving(B, running=0)], [intent(C, 100)], 100).actions == [Drain("b", "c")]
    early = decide([serving(A), serving(B, 95, running=0)], [intent(C, 100)], 100)
    assert (early.actions, early.check_at_s) == ([], 105)


def test_the_victim_is_the_one_with_the_oldest_last_access() -> None:
    occupants = [serving(A, last_access_s=99), serving(B, last_access_s=98)]
    assert decide(occupants, [intent(C, 100)], 110).actions == [Drain("b", "c")]


def test_a_victim_has_served_for_min_runtime_and_the_first_that_becomes_one_is_waited_for() -> None:
    occupants = [serving(A, 104, 99), serving(B, 102, 110)]
    early = decide(occupants, [intent(C, 100)], 110)
    assert (early.actions, early.check_at_s) == ([], 112)
    assert decide(occupants, [intent(C, 100)], 112).actions == [Drain("b", "c")]


def test_a_popular_model_is_no_victim() -> None:
    assert decide([serving(POPULAR), serving(A, last_access_s=99)], [intent(B, 0)], 100).actions == [Drain("a", "b")]


def test_several_are_displaced_if_one_does_not_free_enough_and_no_more_than_needed() -> None:
    small, other = model("small", 20), model("other", 20)
    occupants = [serving(small, last_access_s=1), serving(other, last_access_s=2), serving(A, last_access_s=3)]
    assert decide(occupants, [intent(model("big", 60), 0)], 100).actions == [Drain("small", "big"), Drain("a", "big")]
    assert decide(occupants, [intent(model("half", 40), 0)], 100).actions == [
        Drain("small", "half"),
        Drain("other", "half"),
    ]


def test_nobody_is_displaced_before_those_eligible_free_enough() -> None:
    occupants = [serving(A), serving(B, 95)]
    assert decide(occupants, [intent(model("big", 80), 90)], 100).actions == []


def test_a_victim_drains_until_its_requests_have_ended_or_drain_timeout_is_over() -> None:
    draining = Occupant(A, ModelState.DRAINING, 100, running=2)
    waits = decide([draining, serving(B)], [intent(C, 90)], 129)
    assert (waits.actions, waits.check_at_s) == ([], 130)
    assert decide([draining, serving(B)], [intent(C, 90)], 130).actions == [Sleep("a")]
    assert decide([replace(draining, running=0), serving(B)], [intent(C, 90)], 101).actions == [Sleep("a")]


def test_a_wake_waits_until_the_memory_is_free() -> None:
    assert decide([Occupant(A, ModelState.SLEEPING, 100), serving(B)], [intent(C, 90)], 100).actions == []
    assert decide([serving(B)], [intent(C, 90)], 100.1).actions == [Wake("c")]


def test_intents_are_served_in_their_order_even_if_a_later_one_would_fit() -> None:
    little = model("little", 10)
    occupants = [serving(model("a", 70))]
    assert decide(occupants, [intent(B, 100), intent(little, 100)], 101).actions == []


def test_memory_that_becomes_free_belongs_to_the_first_intent() -> None:
    draining = Occupant(A, ModelState.DRAINING, 100, running=1)
    big, little = intent(model("big", 60), 90), intent(model("little", 20), 100)
    assert decide([draining], [big, little], 101).actions == []
    assert decide([], [big, little], 102).actions == [Wake("big")]


def test_a_later_intent_takes_what_the_earlier_ones_leave_over() -> None:
    little, middle = model("little", 10), model("middle", 30)
    occupants = [Occupant(A, ModelState.DRAINING, 100, running=1)]
    assert decide(occupants, [intent(middle, 100), intent(little, 101)], 101).actions == [Wake("middle")]
    waking = [*occupants, Occupant(middle, ModelState.WAKING, 101)]
    assert decide(waking, [intent(little, 101)], 101).actions == []
    awake = [*occupants, serving(middle, 102)]
    assert decide(awake, [intent(little, 101)], 102).actions == [Wake("little")]


def test_parked_requests_write_an_intent_and_go_on_after_the_next_wake() -> None:
    ledger = Ledger(80 * GIB, [model("a", 80), model("b", 80)], Rule())
    ledger.run([(0, "a", 60), (20, "b", 1)])
    # a drains from 25 s on, is parked at 55 s, and returns when b has served for 10 s and has no requests
    assert ledger.did(Drain) == [(25, "a"), (66.1, "b")]
    assert ledger.did(Sleep) == [(55, "a"), (66.1, "b")]
    assert [name for _, name in ledger.did(Wake)] == ["a", "b", "a"]
    parked, _ = ledger.requests
    assert parked.ended_s == pytest.approx(66.1 + 0.1 + 1 + (60 - (55 - 1)))


def test_a_model_that_can_never_fit_fails_at_once() -> None:
    assert decide([], [intent(model("huge", 81), 100)], 100).actions == [
        Fail(
            "huge",
            "huge can never be awake: it takes 81.00 GiB, and the device has 80.00 GiB for models (--device-memory)",
        )
    ]


def test_a_wake_beside_popular_models_fails_and_says_who_they_are_and_until_when() -> None:
    other = model("other", 40, popular=True, idle_timeout_s=60)
    occupants = [serving(POPULAR), serving(other, last_access_s=90, running=0)]
    early = decide(occupants, [intent(A, 100)], 104)
    assert (early.actions, early.check_at_s) == ([], 105)
    assert decide(occupants, [intent(A, 100)], 105).actions == [
        Fail(
            "a",
            "a does not fit beside popular or pinned models, which nobody may displace: popular without limit, as it "
            "has no idle_timeout; other for at least 45 s",
        )
    ]


def test_an_intent_that_popular_models_hold_up_does_not_hold_up_others() -> None:
    occupants = [serving(POPULAR)]
    assert decide(occupants, [intent(model("big", 60), 100), intent(A, 100)], 100).actions == [Wake("a")]

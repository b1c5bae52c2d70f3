"""What the predicted policy does differently from the rule."""

from cpd.residency.predicted import Predicted
from cpd.residency.snapshot import Action, Device, Drain, Intent, Model, ModelState, Occupant, Sleep, Stage

A, B, C = (Model(name, 40, wake_s=1.0, sleep_s=0.2) for name in "abc")


def decide(occupants: list[Occupant], intents: list[Intent], now: float = 100.0) -> list[Action]:
    device = Device(80, [A, B, C], occupants, intents)
    return list(Predicted().decide(device, now).actions)


def serving(one: Model, running: int, arrivals_per_s: float, since_s: float = 0.0) -> Occupant:
    return Occupant(one, ModelState.SERVING, since_s, 99.0, running, arrivals_per_s=arrivals_per_s)


def waiting(since_s: float, *deadlines: float) -> Intent:
    return Intent(C, since_s, 1e9, deadlines, wake_s=1.0)


def test_the_victim_displaces_the_fewest_requests() -> None:
    occupants = [serving(A, 1, 2.0), serving(B, 1, 0.5)]
    assert decide(occupants, [waiting(95, 110)])[0] == Drain("b", "c")


def test_many_waiting_requests_displace_a_busy_model_at_once() -> None:
    occupants = [serving(A, 1, 0.4), serving(B, 1, 0.4)]
    assert decide(occupants, [waiting(99, *[110.0] * 3)]) == []
    assert decide(occupants, [waiting(99, *[110.0] * 6)])[0] == Drain("a", "c")


def test_nobody_is_displaced_before_min_runtime_however_many_wait() -> None:
    occupants = [serving(A, 1, 0.0, since_s=91), serving(B, 1, 0.0, since_s=92)]
    assert decide(occupants, [waiting(80, *[110.0] * 100)]) == []


def test_a_victim_is_displaced_when_a_deadline_would_be_lost() -> None:
    occupants = [serving(A, 1, 2.0), serving(B, 1, 2.0)]
    assert decide(occupants, [waiting(99, 102.5)]) == []  # sleep 0.2, wake 1, margin 1
    assert decide(occupants, [waiting(99, 102.5)], 100.3)[0] == Drain("a", "c")


def test_requests_are_parked_when_that_saves_more_than_it_misses() -> None:
    waits = waiting(95, 102.5, 102.6)

    def draining(*deadlines: float) -> list[Occupant]:
        return [
            serving(B, 1, 1.0),
            Occupant(A, ModelState.DRAINING, 99, 95, len(deadlines), deadlines=deadlines, drain_s=5.0),
        ]

    assert Sleep("a") in decide(draining(120, 120, 120), [waits], 100.3)
    assert Sleep("a") not in decide(draining(105, 105, 105), [waits], 100.3)


def test_the_next_model_is_staged_while_the_victim_drains() -> None:
    occupants = [
        serving(B, 1, 1.0),
        Occupant(A, ModelState.DRAINING, 99.9, 95, 3, deadlines=(101, 101, 101), drain_s=5.0),
    ]
    assert decide(occupants, [waiting(95, 110)]) == [Stage("c")]

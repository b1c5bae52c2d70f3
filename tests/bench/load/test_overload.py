from collections.abc import Callable

from bench.load.overload import Overload
from bench.record import Record


def watch(in_flight: Callable[[float], float], latency_s: Callable[[float], float], seconds: float) -> Overload:
    overload = Overload()
    for tick in range(int(seconds * 4)):
        at_s = tick / 4
        record = Record(0, 0, 8, 8, due_s=at_s, sent_s=at_s, content_s=[at_s + latency_s(at_s)])
        overload.update([record], int(in_flight(at_s)), at_s)
    return overload


def test_a_queue_that_grows_with_its_latency_is_an_overload() -> None:
    assert watch(lambda at_s: 5 + 10 * at_s, lambda at_s: 0.1 + at_s / 2, 12).seen


def test_a_stable_queue_is_none() -> None:
    assert not watch(lambda _: 200, lambda _: 3.0, 30).seen


def test_filling_up_at_the_start_is_none() -> None:
    assert not watch(lambda at_s: min(100, 40 * at_s), lambda at_s: min(1.0, 0.2 + at_s / 4), 30).seen


def test_growing_requests_at_a_constant_latency_are_a_ramp_and_none() -> None:
    assert not watch(lambda at_s: 5 + 10 * at_s, lambda _: 0.1, 12).seen


def test_a_few_requests_in_flight_are_none() -> None:
    assert not watch(lambda at_s: min(7, at_s), lambda at_s: 0.1 + at_s, 12).seen


def test_an_overload_stays_seen_when_the_ended_run_empties() -> None:
    overload = watch(lambda at_s: 5 + 10 * at_s, lambda at_s: 0.1 + at_s / 2, 12)
    overload.update([], 0, 12.5)
    assert overload.seen

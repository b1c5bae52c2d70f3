from collections.abc import Callable

from bench.load.overload import Overload


def run(waiting: Callable[[float], float], seconds: float, first_answer_s: float = 0.5) -> Overload:
    overload = Overload()
    for tick in range(int(seconds * 4)):
        overload(tick / 4, int(waiting(tick / 4)), tick / 4 >= first_answer_s)
    return overload


def test_a_queue_that_keeps_growing_is_an_overload() -> None:
    assert run(lambda at_s: 5 + 10 * at_s, 12).seen


def test_a_stable_queue_is_none() -> None:
    assert not run(lambda _: 200, 30).seen


def test_filling_up_at_the_start_is_none() -> None:
    assert not run(lambda at_s: min(100, 40 * at_s), 30).seen


def test_everybody_waiting_for_the_first_answer_is_none() -> None:
    assert not run(lambda at_s: 4 * min(at_s, 10), 60, first_answer_s=10).seen


def test_an_overload_with_a_late_first_answer_is_seen() -> None:
    assert run(lambda at_s: 4 * at_s, 60, first_answer_s=10).seen


def test_a_server_that_never_answers_is_an_overload() -> None:
    assert not run(lambda at_s: 4 * at_s, 29, first_answer_s=1e9).seen
    assert run(lambda at_s: 4 * at_s, 31, first_answer_s=1e9).seen


def test_a_few_waiting_requests_are_none() -> None:
    assert not run(lambda at_s: min(7, at_s), 12).seen


def test_an_overload_stays_seen_when_the_ended_run_empties() -> None:
    overload = run(lambda at_s: 5 + 10 * at_s, 12)
    assert overload(12.5, 0, True)
    assert overload.seen

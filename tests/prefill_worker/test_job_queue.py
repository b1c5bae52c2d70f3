import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import QueueFullError
from cpd.performance.model import Work
from engine.scheduling.fair_queue import Terms
from prefill_worker.job_queue import FillQueue, Place


def queue(max_tokens: int = 1000, slack_tokens: int = 100, early_pages: int = 100) -> FillQueue:
    return FillQueue(max_tokens=max_tokens, slack_tokens=slack_tokens, early_pages=early_pages)


async def test_a_fill_that_may_not_start_early_holds_back_only_its_decode_worker() -> None:
    q = queue(early_pages=0)
    stuck = q.enter("a", Terms(300), 0.0)
    assert not stuck.early
    same, other = q.enter("a", Terms(50), 0.0), q.enter("b", Terms(50), 0.0)
    assert granted(same, other) == [False, True]


def granted(*places: Place) -> list[bool]:
    return [place.turn.done() for place in places]


async def test_the_first_is_granted_at_once_and_the_next_when_work_runs_out() -> None:
    q = queue()
    first, second = q.enter("d", Terms(300), 0.0), q.enter("d", Terms(300), 0.0)
    assert granted(first, second) == [True, False]
    q.landed(first, 0.0)
    q.computed(first, 100, 0.0)
    assert not second.turn.done()
    q.computed(first, 99, 0.0)
    assert second.turn.done()


async def test_short_ones_are_granted_together_up_to_the_slack() -> None:
    q = queue()
    places = [q.enter("d", Terms(40), 0.0) for _ in range(5)]
    assert granted(*places) == [True, True, True, False, False]


async def test_one_whose_decode_worker_does_not_answer_holds_back_only_that_ones() -> None:
    q = queue()
    stuck = q.enter("a", Terms(300), 0.0)
    q.computed(stuck, 0, 0.0)
    same, other = q.enter("a", Terms(50), 0.0), q.enter("b", Terms(50), 0.0)
    assert granted(same, other) == [False, True]
    q.landed(stuck, 0.0)
    assert same.turn.done()


async def test_pages_that_wait_for_a_landing_are_bounded() -> None:
    q = queue(slack_tokens=1000, early_pages=10)
    first, second, third = q.enter("a", Terms(80), 0.0), q.enter("b", Terms(96), 0.0), q.enter("c", Terms(80), 0.0)
    assert [place.early for place in (first, second, third)] == [True, False, True]
    q.landed(first, 0.0)
    assert q.enter("d", Terms(80), 0.0).early


async def test_one_that_would_be_done_too_late_lets_the_others_pass() -> None:
    q = FillQueue(max_tokens=10_000, slack_tokens=100, early_pages=100, predicted_s=lambda tokens: tokens / 1000)
    running = q.enter("d", Terms(300), 0.0)
    long, short = q.enter("d", Terms(2000, deadline=2.0), 0.0), q.enter("d", Terms(500, deadline=2.0), 0.0)
    assert (q.late_work(0.0), q.late_work(0.3)) == (Work.prefill(500), Work.prefill(2000))
    q.landed(running, 0.3)
    q.computed(running, 0, 0.3)
    assert granted(long, short) == [False, True]


async def test_how_long_one_takes_is_by_what_is_not_cached() -> None:
    q = FillQueue(max_tokens=10_000, slack_tokens=100, early_pages=100, predicted_s=lambda tokens: tokens / 1000)
    running = q.enter("d", Terms(300), 0.0)
    long, short = q.enter("d", Terms(2000, deadline=2.0), 0.0), q.enter("d", Terms(500, deadline=2.0), 0.0)
    q.computed(long, 1000, 0.1)
    assert q.late_work(0.3) == Work()
    q.landed(running, 0.3)
    q.computed(running, 0, 0.3)
    assert granted(long, short) == [True, False]


async def test_leaving_makes_room_from_every_state_and_may_be_repeated() -> None:
    q = queue()
    first, second, third = (q.enter("d", Terms(200), 0.0) for _ in range(3))
    q.leave(second, 0.0)
    q.leave(second, 0.0)
    assert not third.turn.done()
    q.leave(first, 0.0)
    assert third.turn.done()
    q.leave(third, 0.0)
    assert q.waiting == []


async def test_a_full_queue_refuses_but_an_empty_one_takes_anything() -> None:
    q = queue(max_tokens=500)
    q.enter("d", Terms(10_000), 0.0)
    q.enter("d", Terms(10_000), 0.0)
    with pytest.raises(QueueFullError, match="10000 tokens"):
        q.enter("d", Terms(1), 0.0)


async def test_those_who_wait_are_known() -> None:
    q = queue()
    first, second = q.enter("d", Terms(300), 0.0), q.enter("d", Terms(20), 0.0)
    assert q.waiting == [second]
    q.leave(first, 0.0)
    assert q.waiting == []


async def test_tenants_take_turns_and_the_urgent_one_goes_first() -> None:
    q = queue(max_tokens=5000, slack_tokens=1)
    running = q.enter("d", Terms(600), 0.0)
    flood = [q.enter("d", Terms(500, "flood"), 0.0) for _ in range(3)]
    others = [q.enter("e", Terms(500, "other", deadline=deadline), 0.0) for deadline in (9.0, 5.0)]
    q.landed(running, 0.0)
    order = []
    turn: Place | None = running
    while turn is not None:
        q.leave(turn, 1.0)
        turn = next((place for place in (*flood, *others) if place.turn.done() and place not in order), None)
        order += [turn] if turn else []
    assert order == [flood[0], others[1], flood[1], others[0], flood[2]]


async def test_what_waits_is_known_as_far_as_it_is_to_be_computed() -> None:
    q = queue()
    first, second = q.enter("d", Terms(300), 0.0), q.enter("d", Terms(200), 0.0)
    assert (q.waiting_tokens, q.waiting_work) == (200, Work.prefill(200))
    q.computed(second, 50, 0.0)  # the rest is cached
    assert (q.waiting_tokens, q.waiting_work) == (200, Work.prefill(50, 150))
    q.leave(first, 0.0)
    assert (q.waiting_tokens, q.waiting_work) == (0, Work())


Action = st.tuples(st.sampled_from(["enter", "land", "compute", "leave"]), st.integers(0, 9), st.integers(1, 300))


@given(st.lists(Action, max_size=60))
def test_whatever_happens_everyone_gets_a_turn_in_order(actions: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        q = queue(max_tokens=10**6)
        live: list[Place] = []
        for action, which, tokens in actions:
            if action == "enter":
                live.append(q.enter("ab"[which % 2], Terms(tokens), 0.0))
            elif live:
                place = live[which % len(live)]
                if action == "land" and place.turn.done():
                    q.landed(place, 0.0)
                elif action == "compute" and place.turn.done():
                    q.computed(place, min(tokens, place.left), 0.0)
                elif action == "leave":
                    q.leave(place, 0.0)
                    live.remove(place)
            for owner in "ab":
                turns = granted(*(place for place in live if place.owner == owner))
                assert turns == sorted(turns, reverse=True), "somebody overtook another one of the same decode worker"
        while live:
            turn = [place for place in live if place.turn.done()]
            assert turn, "nobody has a turn although nothing computes"
            for place in turn:
                q.leave(place, 0.0)
                live.remove(place)

    asyncio.run(run())

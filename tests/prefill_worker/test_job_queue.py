import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import QueueFullError
from cpd.performance.model import Work
from engine.scheduling.fair_queue import Terms
from prefill_worker.job_queue import JobQueue, QueuedJob


def queue(max_tokens: int = 1000, slack_tokens: int = 100, early_pages: int = 100) -> JobQueue:
    return JobQueue(max_tokens=max_tokens, slack_tokens=slack_tokens, early_pages=early_pages)


async def test_a_job_that_may_not_start_early_delays_only_its_decode_worker() -> None:
    q = queue(early_pages=0)
    stuck = q.add("a", Terms(300), 0.0)
    assert not stuck.early
    same, other = q.add("a", Terms(50), 0.0), q.add("b", Terms(50), 0.0)
    assert granted(same, other) == [False, True]


def granted(*jobs: QueuedJob) -> list[bool]:
    return [job.granted.done() for job in jobs]


async def test_the_first_job_is_granted_at_once_and_the_next_when_work_runs_out() -> None:
    q = queue()
    first, second = q.add("d", Terms(300), 0.0), q.add("d", Terms(300), 0.0)
    assert granted(first, second) == [True, False]
    q.set_landed(first, 0.0)
    q.set_tokens_left(first, 100, 0.0)
    assert not second.granted.done()
    q.set_tokens_left(first, 99, 0.0)
    assert second.granted.done()


async def test_short_jobs_are_granted_together_up_to_the_slack() -> None:
    q = queue()
    jobs = [q.add("d", Terms(40), 0.0) for _ in range(5)]
    assert granted(*jobs) == [True, True, True, False, False]


async def test_a_decode_worker_that_does_not_answer_delays_only_its_own_jobs() -> None:
    q = queue()
    stuck = q.add("a", Terms(300), 0.0)
    q.set_tokens_left(stuck, 0, 0.0)
    same, other = q.add("a", Terms(50), 0.0), q.add("b", Terms(50), 0.0)
    assert granted(same, other) == [False, True]
    q.set_landed(stuck, 0.0)
    assert same.granted.done()


async def test_pages_that_wait_for_a_landing_are_bounded() -> None:
    q = queue(slack_tokens=1000, early_pages=10)
    first, second, third = q.add("a", Terms(80), 0.0), q.add("b", Terms(96), 0.0), q.add("c", Terms(80), 0.0)
    assert [job.early for job in (first, second, third)] == [True, False, True]
    q.set_landed(first, 0.0)
    assert q.add("d", Terms(80), 0.0).early


async def test_a_job_that_would_miss_its_deadline_lets_others_pass() -> None:
    q = JobQueue(max_tokens=10_000, slack_tokens=100, early_pages=100, predicted_s=lambda tokens: tokens / 1000)
    running = q.add("d", Terms(300), 0.0)
    long, short = q.add("d", Terms(2000, deadline=2.0), 0.0), q.add("d", Terms(500, deadline=2.0), 0.0)
    assert (q.late_work(0.0), q.late_work(0.3)) == (Work.prefill(2000), Work.prefill(2000))
    q.set_landed(running, 0.3)
    q.set_tokens_left(running, 0, 0.3)
    assert granted(long, short) == [False, True]


async def test_predictions_count_only_uncached_tokens() -> None:
    q = JobQueue(max_tokens=10_000, slack_tokens=100, early_pages=100, predicted_s=lambda tokens: tokens / 1000)
    running = q.add("d", Terms(300), 0.0)
    long, short = q.add("d", Terms(2000, deadline=2.0), 0.0), q.add("d", Terms(500, deadline=2.0), 0.0)
    q.set_tokens_left(long, 1000, 0.1)
    assert q.late_work(0.3) == Work()
    q.set_landed(running, 0.3)
    q.set_tokens_left(running, 0, 0.3)
    assert granted(long, short) == [True, False]


async def test_removing_makes_room_from_every_state_and_may_be_repeated() -> None:
    q = queue()
    first, second, third = (q.add("d", Terms(200), 0.0) for _ in range(3))
    q.remove(second, 0.0)
    q.remove(second, 0.0)
    assert not third.granted.done()
    q.remove(first, 0.0)
    assert third.granted.done()
    q.remove(third, 0.0)
    assert q.waiting == []


async def test_a_full_queue_refuses_but_an_empty_one_accepts_any_job() -> None:
    q = queue(max_tokens=500)
    q.add("d", Terms(10_000), 0.0)
    q.add("d", Terms(10_000), 0.0)
    with pytest.raises(QueueFullError, match="10000 tokens"):
        q.add("d", Terms(1), 0.0)


async def test_waiting_lists_the_jobs_that_are_not_granted() -> None:
    q = queue()
    first, second = q.add("d", Terms(300), 0.0), q.add("d", Terms(20), 0.0)
    assert q.waiting == [second]
    q.remove(first, 0.0)
    assert q.waiting == []


async def test_tenants_alternate_and_the_most_urgent_job_goes_first() -> None:
    q = queue(max_tokens=5000, slack_tokens=1)
    running = q.add("d", Terms(600), 0.0)
    flood = [q.add("d", Terms(500, "flood"), 0.0) for _ in range(3)]
    others = [q.add("e", Terms(500, "other", deadline=deadline), 0.0) for deadline in (9.0, 5.0)]
    q.set_landed(running, 0.0)
    order = []
    turn: QueuedJob | None = running
    while turn is not None:
        q.remove(turn, 1.0)
        turn = next((job for job in (*flood, *others) if job.granted.done() and job not in order), None)
        order += [turn] if turn else []
    assert order == [flood[0], others[1], flood[1], others[0], flood[2]]


async def test_waiting_work_counts_only_uncached_tokens() -> None:
    q = queue()
    first, second = q.add("d", Terms(300), 0.0), q.add("d", Terms(200), 0.0)
    assert (q.waiting_tokens, q.waiting_work) == (200, Work.prefill(200))
    q.set_tokens_left(second, 50, 0.0)  # the rest is cached
    assert (q.waiting_tokens, q.waiting_work) == (200, Work.prefill(50, 150))
    q.remove(first, 0.0)
    assert (q.waiting_tokens, q.waiting_work) == (0, Work())


Action = st.tuples(st.sampled_from(["enter", "land", "compute", "leave"]), st.integers(0, 9), st.integers(1, 300))


@given(st.lists(Action, max_size=60))
def test_every_job_of_a_decode_worker_is_granted_in_order(actions: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        q = queue(max_tokens=10**6)
        live: list[QueuedJob] = []
        for action, which, tokens in actions:
            if action == "enter":
                live.append(q.add("ab"[which % 2], Terms(tokens), 0.0))
            elif live:
                job = live[which % len(live)]
                if action == "land" and job.granted.done():
                    q.set_landed(job, 0.0)
                elif action == "compute" and job.granted.done():
                    q.set_tokens_left(job, min(tokens, job.tokens_left), 0.0)
                elif action == "leave":
                    q.remove(job, 0.0)
                    live.remove(job)
            for decode_worker in "ab":
                turns = granted(*(job for job in live if job.decode_worker == decode_worker))
                assert turns == sorted(turns, reverse=True), "a job overtook another one of the same decode worker"
        while live:
            turn = [job for job in live if job.granted.done()]
            assert turn, "no job runs although the engine is idle"
            for job in turn:
                q.remove(job, 0.0)
                live.remove(job)

    asyncio.run(run())

"""Admission: which sequences start, and which wait."""

from cpd.performance.colocation import BatchLimit, PrefillBudget
from engine.scheduling.sequence import SequenceState
from tests.engine.scheduling.harness import MixedScheduler, add, composition, compute, create_scheduler, step


def test_all_pages_of_a_prompt_are_taken_at_once() -> None:
    scheduler = create_scheduler(token_budget=16)
    seq = add(scheduler, 100)
    step(scheduler)
    assert (seq.num_computed, seq.num_pages) == (16, 7)


def test_a_sequence_that_needs_a_block_of_a_running_step_waits_until_it_is_collected() -> None:
    scheduler = create_scheduler()
    add(scheduler, 40, number=0)
    follower = add(scheduler, 40, number=1)
    plan = scheduler.schedule()
    assert composition(plan) == [("0", 0, 40)]
    assert scheduler.cache.pending.waiting() == [follower]
    compute(scheduler, plan)
    assert scheduler.waiting.resumable == [follower]
    assert step(scheduler) == [("0", 40, 1), ("1", 32, 8)]


def test_followers_are_woken_when_the_filler_ends_early() -> None:
    scheduler = create_scheduler()
    producer, follower = add(scheduler, 40, number=0), add(scheduler, 40, number=1)
    scheduler.schedule()
    assert scheduler.cache.pending.waiting() == [follower]
    scheduler.pool.release(scheduler.finish(producer))
    scheduler.check_integrity()
    assert scheduler.waiting.resumable == [follower]
    assert step(scheduler) == [("1", 0, 40)]


def test_a_blocked_sequence_that_now_waits_for_its_prefix_no_longer_blocks_landings() -> None:
    scheduler = create_scheduler(num_pages=8, token_budget=200)
    add(scheduler, 60, start=0, number=0)
    step(scheduler)
    blocked = add(scheduler, 80, start=1, number=1)
    step(scheduler)
    scheduler.reserve_row("landing", blocked.hashes[:1])
    scheduler.pool.release(scheduler.pool.take(1) or [])
    assert scheduler.spare_for_reservation() is None
    before = scheduler.version
    scheduler.schedule()
    assert blocked.state is SequenceState.WAITING_FOR_PREFIX
    assert scheduler.spare_for_reservation() is not None
    assert scheduler.version != before


def test_a_blocked_sequence_is_admitted_as_soon_as_there_are_pages() -> None:
    scheduler = create_scheduler(num_pages=8, token_budget=200)
    first = add(scheduler, 60, start=0, number=0)
    second = add(scheduler, 70, start=1, number=1)
    third = add(scheduler, 10, start=2, number=2)
    for _ in range(3):
        assert [name for name, _, _ in step(scheduler)] == ["0"]
    assert third.state is SequenceState.WAITING  # no overtaking: a large request is not starved by small ones
    scheduler.pool.release(scheduler.finish(first))
    assert [name for name, _, _ in step(scheduler)] == ["1", "2"]
    assert second.state is SequenceState.RUNNING


def pass_by(scheduler: MixedScheduler, mixed: int = 20, lane_chunk: int = 0) -> tuple[list[str], list[str]]:
    """A step with this budget: the requests that join the decodes' batch, and those on the prefill lane."""
    plan = scheduler.schedule_decodes()
    limit = BatchLimit(len(plan.decodes) + mixed)
    lane = scheduler.schedule_prefills(plan, PrefillBudget(limit, lane_chunk, mixed_with_lane=limit))
    compute(scheduler, plan)
    scheduler.check_integrity()
    return [name for name, _, _ in composition(plan)], [name for name, _, _ in composition(lane)]


class TestPassing:
    """A sequence arrives while the first one waits for a busy prefill lane."""

    def test_short_prompts_pass_while_there_is_room(self) -> None:
        scheduler = create_scheduler()
        add(scheduler, 100, start=0, number=0)
        for number, length in ((1, 12), (2, 90), (3, 8), (4, 5)):
            add(scheduler, length, start=number, number=number)
        assert pass_by(scheduler, mixed=20) == (["1", "3"], [])
        assert pass_by(scheduler, mixed=20) == (["1", "3", "4"], [])

    def test_when_the_lane_is_free_the_first_sequence_gets_it(self) -> None:
        scheduler = create_scheduler(max_num_seqs=4)
        add(scheduler, 100, start=0, number=0)
        for number in range(1, 30):
            add(scheduler, 10, start=number, number=number)
        for _ in range(10):
            pass_by(scheduler)
        assert len(scheduler.running) == 3  # one row is left
        mixed, lane = pass_by(scheduler, lane_chunk=64)
        assert lane == ["0"]
        assert len(mixed) == 3

    def test_the_first_sequence_keeps_the_pages_that_it_needs(self) -> None:
        scheduler = create_scheduler(num_pages=11)
        add(scheduler, 100, start=0, number=0)  # 7 pages
        for number in range(1, 9):
            add(scheduler, 10, start=number, number=number)
        passed, _ = pass_by(scheduler, mixed=60)
        assert passed == ["1", "2"]  # one page each to start with, and one each to grow
        assert pass_by(scheduler, mixed=10, lane_chunk=100)[1] == ["0"]

    def test_a_sequence_that_would_wait_for_a_block_does_not_pass(self) -> None:
        scheduler = create_scheduler()
        add(scheduler, 64, start=1, number=0)
        assert pass_by(scheduler, lane_chunk=40) == ([], ["0"])
        add(scheduler, 100, start=2, number=1)
        follower = add(scheduler, 64, start=1, number=2)
        assert pass_by(scheduler, mixed=64) == (["0"], [])
        assert follower.state is SequenceState.WAITING

    def test_a_long_prompt_passes_if_the_uncached_part_is_short(self) -> None:
        scheduler = create_scheduler()
        first = add(scheduler, 60, start=1, number=0)
        step(scheduler)
        scheduler.pool.release(scheduler.finish(first))
        add(scheduler, 100, start=2, number=1)
        add(scheduler, 64, start=1, number=2)  # 48 of them are cached
        assert pass_by(scheduler, mixed=20) == (["2"], [])

"""The scheduler alone: what it puts into a step. No weights, no tokens: each sample is token 1."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.colocation import Room
from engine.plan import Plan, build_batch
from engine.pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Seq, State
from tests.engine.fakes import check_batch, make_request, prompt


class MixedScheduler(Scheduler):
    """Puts everything into one batch."""

    def __init__(self, num_pages: int, token_budget: int, max_num_seqs: int) -> None:
        super().__init__(
            BlockPool(num_pages),
            max_len=num_pages * 16,
            max_num_seqs=min(max_num_seqs, token_budget),
            copy_page=lambda source, target: None,
        )
        self._token_budget = token_budget

    def schedule(self) -> Plan:
        plan = self.decodes()
        assert not self.prefills(plan, Room(self._token_budget - len(plan.singles), cut=True))
        return plan


def create_scheduler(num_pages: int = 64, *, token_budget: int = 64, max_num_seqs: int = 8) -> MixedScheduler:
    return MixedScheduler(num_pages, token_budget, max_num_seqs)


def add(scheduler: Scheduler, length: int, start: int = 0, number: int = 0) -> Seq:
    """A sequence with a prompt of this length."""
    request = make_request(str(number), prompt(length, start), max_tokens=1000)
    seq = Seq(
        request=request,
        choices=[0],
        order=(number, 0),
        hashes=list(request.block_hashes),
        tokens=build_tokens(request.token_ids),
        num_tokens=length,
    )
    scheduler.add(seq)
    return seq


def build_tokens(token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


def composition(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.seq.request.id, chunk.start, chunk.count) for chunk in plan.chunks]


def compute(scheduler: Scheduler, plan: Plan) -> None:
    """As if the step had run: every chunk that samples gets one more token."""
    for chunk in plan.chunks:
        scheduler.advance(chunk)
        if chunk.samples:
            scheduler.table.add_token(chunk.seq, 1)


def step(scheduler: MixedScheduler) -> list[tuple[str, int, int]]:
    plan = scheduler.schedule()
    compute(scheduler, plan)
    scheduler.check_integrity()
    return composition(plan)


def test_one_budget_for_decodes_then_chunks_then_new_ones() -> None:
    scheduler = create_scheduler(token_budget=32)
    for number, length in enumerate((10, 30, 40)):
        add(scheduler, length, start=number, number=number)
    assert step(scheduler) == [("0", 0, 10), ("1", 0, 22)]
    assert step(scheduler) == [("0", 10, 1), ("1", 22, 8), ("2", 0, 23)]
    assert step(scheduler) == [("0", 11, 1), ("1", 30, 1), ("2", 23, 17)]
    assert step(scheduler) == [("0", 12, 1), ("1", 31, 1), ("2", 40, 1)]


def test_a_chunk_of_one_token_goes_with_the_decodes() -> None:
    scheduler = create_scheduler(token_budget=17)
    add(scheduler, 16, start=0, number=0)
    add(scheduler, 40, start=1, number=1)
    plan = scheduler.schedule()
    assert [(chunk.seq.request.id, chunk.count) for chunk in plan.singles] == [("1", 1)]
    assert [(chunk.seq.request.id, chunk.count) for chunk in plan.longer] == [("0", 16)]
    batch = build_batch(plan, scheduler.table)
    check_batch(batch, 64)
    assert [(row.row, row.position) for row in batch.samples] == [(16, 16)]


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    scheduler = create_scheduler(token_budget=4)
    for number in range(6):
        add(scheduler, 3, start=number, number=number)
    for _ in range(12):
        chunks = step(scheduler)
        assert sum(count for _, _, count in chunks) <= 4
    assert len(scheduler.running) == 4
    assert len(step(scheduler)) == 4


def test_all_pages_of_a_prompt_are_taken_at_once() -> None:
    scheduler = create_scheduler(token_budget=16)
    seq = add(scheduler, 100)
    step(scheduler)
    assert (seq.num_computed, seq.num_pages) == (16, 7)


def test_pages_run_out_the_newest_gives_up_its_own_and_its_claims() -> None:
    scheduler = create_scheduler(num_pages=8, token_budget=200)
    old, new = add(scheduler, 48, start=0, number=0), add(scheduler, 47, start=1, number=1)
    while not scheduler.preemptions:
        step(scheduler)
    assert (old.state, new.state) == (State.RUNNING, State.RETURNING)
    assert scheduler.line.returning == [new]
    assert set(scheduler.pending.fillers().values()) <= {old}


def test_a_sequence_alone_that_finds_no_page_keeps_what_it_has() -> None:
    scheduler = create_scheduler(num_pages=8)
    seq = add(scheduler, 60)
    step(scheduler)
    assert scheduler.pool.reserve(4) is not None
    for _ in range(4):
        step(scheduler)
    assert scheduler.schedule().chunks == []
    assert (seq.state, scheduler.preemptions) == (State.RUNNING, 0)
    assert scheduler.first_in_line() is seq


def test_who_needs_a_block_of_a_running_step_waits_until_it_is_collected() -> None:
    scheduler = create_scheduler()
    add(scheduler, 40, number=0)
    follower = add(scheduler, 40, number=1)
    plan = scheduler.schedule()
    assert composition(plan) == [("0", 0, 40)]
    assert scheduler.pending.waiting() == [follower]
    compute(scheduler, plan)
    assert scheduler.line.returning == [follower]
    assert step(scheduler) == [("0", 40, 1), ("1", 32, 8)]


def test_followers_are_woken_when_the_filler_ends_early() -> None:
    scheduler = create_scheduler()
    filler, follower = add(scheduler, 40, number=0), add(scheduler, 40, number=1)
    scheduler.schedule()
    assert scheduler.pending.waiting() == [follower]
    scheduler.pool.release(scheduler.finish(filler))
    scheduler.check_integrity()
    assert scheduler.line.returning == [follower]
    assert step(scheduler) == [("1", 0, 40)]


def test_a_blocked_one_is_admitted_as_soon_as_there_are_pages() -> None:
    scheduler = create_scheduler(num_pages=8, token_budget=200)
    first = add(scheduler, 60, start=0, number=0)
    second = add(scheduler, 70, start=1, number=1)
    third = add(scheduler, 10, start=2, number=2)
    for _ in range(3):
        assert [name for name, _, _ in step(scheduler)] == ["0"]
    assert third.state is State.QUEUED  # no overtaking: a large request is not starved by small ones
    scheduler.pool.release(scheduler.finish(first))
    assert [name for name, _, _ in step(scheduler)] == ["1", "2"]
    assert second.state is State.RUNNING


def pass_by(scheduler: MixedScheduler, along: int = 20, aside: int = 0) -> tuple[list[str], list[str]]:
    """A step with this room beside a prefill lane: what goes along with the decodes, and what aside."""
    plan = scheduler.decodes()
    lane = scheduler.prefills(plan, Room(along, aside))
    compute(scheduler, plan)
    scheduler.check_integrity()
    return [name for name, _, _ in composition(plan)], [name for name, _, _ in composition(lane)]


class TestBothLanes:
    """What goes along while something goes aside runs on a part of the device."""

    def waiting(self, *lengths: int) -> MixedScheduler:
        scheduler = create_scheduler()
        for number, length in enumerate(lengths):
            add(scheduler, length, start=number, number=number)
        return scheduler

    def room(self, scheduler: MixedScheduler) -> tuple[list[str], list[str]]:
        plan = scheduler.decodes()
        lane = scheduler.prefills(plan, Room(along=40, aside=200, beside=10))
        return [name for name, _, _ in composition(plan)], [name for name, _, _ in composition(lane)]

    def test_a_batch_that_needs_the_whole_device_leaves_nothing_to_the_lane(self) -> None:
        assert self.room(self.waiting(30, 100)) == (["0"], [])

    def test_beside_a_prompt_that_went_aside_there_is_less_room(self) -> None:
        assert self.room(self.waiting(100, 9, 8)) == (["1"], ["0", "2"])

    def test_a_small_batch_leaves_the_lane_free(self) -> None:
        assert self.room(self.waiting(9, 100)) == (["0"], ["1"])


class TestPassing:
    """While the first in line waits for a busy prefill lane."""

    def test_short_prompts_pass_as_many_as_there_is_room_for(self) -> None:
        scheduler = create_scheduler()
        add(scheduler, 100, start=0, number=0)
        for number, length in ((1, 12), (2, 90), (3, 8), (4, 5)):
            add(scheduler, length, start=number, number=number)
        assert pass_by(scheduler, along=20) == (["1", "3"], [])
        assert pass_by(scheduler, along=20) == (["1", "3", "4"], [])

    def test_when_the_lane_is_free_the_first_in_line_has_it(self) -> None:
        scheduler = create_scheduler(max_num_seqs=4)
        add(scheduler, 100, start=0, number=0)
        for number in range(1, 30):
            add(scheduler, 10, start=number, number=number)
        for _ in range(10):
            pass_by(scheduler)
        assert len(scheduler.running) == 3  # a row is left
        along, aside = pass_by(scheduler, aside=64)
        assert aside == ["0"]
        assert len(along) == 3

    def test_the_first_in_line_is_left_the_pages_that_it_needs(self) -> None:
        scheduler = create_scheduler(num_pages=11)
        add(scheduler, 100, start=0, number=0)  # 7 pages
        for number in range(1, 9):
            add(scheduler, 10, start=number, number=number)
        passed, _ = pass_by(scheduler, along=60)
        assert passed == ["1", "2"]  # a page each to be in and one each to grow by
        assert pass_by(scheduler, along=10, aside=100)[1] == ["0"]

    def test_who_would_wait_for_a_block_does_not_pass(self) -> None:
        scheduler = create_scheduler()
        add(scheduler, 64, start=1, number=0)
        assert pass_by(scheduler, aside=40) == ([], ["0"])
        add(scheduler, 100, start=2, number=1)
        follower = add(scheduler, 64, start=1, number=2)
        assert pass_by(scheduler, along=64) == (["0"], [])
        assert follower.state is State.QUEUED

    def test_a_cached_prompt_passes_by_what_it_lacks(self) -> None:
        scheduler = create_scheduler()
        first = add(scheduler, 60, start=1, number=0)
        step(scheduler)
        scheduler.pool.release(scheduler.finish(first))
        add(scheduler, 100, start=2, number=1)
        add(scheduler, 64, start=1, number=2)  # 48 of them are cached
        assert pass_by(scheduler, along=20) == (["2"], [])


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    starts=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    num_pages=st.integers(8, 30),
    token_budget=st.integers(1, 80),
    max_num_seqs=st.integers(1, 6),
)
def test_rules_that_every_step_keeps(
    lengths: list[int], starts: list[int], num_pages: int, token_budget: int, max_num_seqs: int
) -> None:
    scheduler = create_scheduler(num_pages, token_budget=token_budget, max_num_seqs=max_num_seqs)
    seqs = [add(scheduler, length, starts[i], number=i) for i, length in enumerate(lengths)]
    for _ in range(60):
        before = {seq: seq.num_computed for seq in scheduler.running}
        plan = scheduler.schedule()
        assert sum(chunk.count for chunk in plan.chunks) <= token_budget
        assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks) <= max_num_seqs
        assert {chunk.seq for chunk in plan.chunks} == set(scheduler.running)  # each one advances
        if plan.chunks:
            check_batch(build_batch(plan, scheduler.table), num_pages)
        for seq in scheduler.running:
            assert seq.num_computed >= before.get(seq, 0)
        compute(scheduler, plan)
        scheduler.check_integrity()
        scheduler.pool.check_integrity()
        for seq in tuple(scheduler.running):
            if seq.num_tokens >= min(len(seq.request.token_ids) + 20, num_pages * 16):
                scheduler.pool.release(scheduler.finish(seq))
        if all(seq.state is State.FINISHED for seq in seqs):
            break
    for seq in seqs:
        if seq.state is not State.FINISHED:
            scheduler.pool.release(scheduler.finish(seq))
    assert scheduler.pool.counts().used == 0
    assert (scheduler.backlog.tokens, scheduler.pending.fillers()) == (0, {})

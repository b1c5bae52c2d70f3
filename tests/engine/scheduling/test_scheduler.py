"""The chunks that the scheduler puts into a step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.performance.colocation import BatchLimit, PrefillBudget
from cpd.performance.model import Work
from engine.scheduling.plan import MAX_DECODE_TOKENS, build_batch
from engine.scheduling.sequence import SequenceState
from tests.engine.fakes import check_batch
from tests.engine.scheduling.harness import MixedScheduler, add, composition, compute, create_scheduler, step


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
    assert [(chunk.seq.request.id, chunk.num_tokens) for chunk in plan.decodes] == [("1", 1)]
    assert [(chunk.seq.request.id, chunk.num_tokens) for chunk in plan.prefills] == [("0", 16)]
    batch = build_batch(plan, scheduler.table)
    check_batch(batch, 64)
    assert [(row.row, row.position) for row in batch.samples] == [(16, 16)]


def test_a_decode_with_forced_tokens_goes_before_an_older_prompt() -> None:
    scheduler = create_scheduler(token_budget=32)
    decoding = add(scheduler, 6, start=0, number=1)
    assert step(scheduler) == [("1", 0, 6)]
    decoding.first_token_sent = True
    add(scheduler, 100, start=50, number=0)
    assert step(scheduler) == [("1", 6, 1), ("0", 0, 31)]
    scheduler.append(decoding, [1] * 5)
    plan = scheduler.schedule()
    assert composition(plan) == [("1", 7, 6), ("0", 31, 26)]
    assert [chunk.num_samples for chunk in plan.chunks] == [1, 0]
    check_batch(build_batch(plan, scheduler.table), 64)


def test_forced_tokens_stay_within_the_tokens_of_a_step() -> None:
    scheduler = create_scheduler(token_budget=32)
    decoding = [add(scheduler, 4, start=10 * number, number=number) for number in range(3)]
    assert len(step(scheduler)) == 3
    for seq in decoding:
        seq.first_token_sent = True
        scheduler.append(seq, [1] * (MAX_DECODE_TOKENS - 1))
    assert step(scheduler) == [("0", 4, 16), ("1", 4, 16)]
    assert step(scheduler) == [("0", 20, 1), ("1", 20, 1), ("2", 4, 16)]


def test_a_chunk_is_shorter_the_more_tokens_it_attends_to() -> None:
    scheduler = create_scheduler()
    add(scheduler, 60, start=0, number=0)
    seconds = add(scheduler, 12, start=1, number=1)
    budget = PrefillBudget(BatchLimit(64, ms=200, step_ms=lambda work: work.pairs), chunked=True)
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule_decodes()
        assert not scheduler.schedule_prefills(plan, budget)
        chunks.append(composition(plan))
        compute(scheduler, plan)
        scheduler.check_integrity()
    # 10 pairs are left in the first step, 12 in the second, 17 in the third
    assert chunks == [
        [("0", 0, 19), ("1", 0, 4)],
        [("0", 19, 8), ("1", 4, 2)],
        [("0", 27, 6), ("1", 6, 2)],
    ]
    assert seconds.state is SequenceState.RUNNING


def test_a_prompt_whose_context_leaves_no_time_for_a_token_goes_on_in_the_next_step() -> None:
    scheduler = create_scheduler()
    add(scheduler, 40, start=0, number=0)
    assert step(scheduler) == [("0", 0, 40)]
    later = add(scheduler, 60, start=0, number=1)  # shares two blocks
    plan = scheduler.schedule_decodes()
    budget = PrefillBudget(BatchLimit(64, ms=60, step_ms=lambda work: work.pairs), chunked=True)
    assert not scheduler.schedule_prefills(plan, budget)
    assert composition(plan) == [("0", 40, 1)]
    assert later.state is SequenceState.RUNNING
    compute(scheduler, plan)
    scheduler.check_integrity()
    assert step(scheduler) == [("0", 41, 1), ("1", 32, 28)]


def test_a_prompt_that_waits_with_others_is_predicted_beside_the_streams() -> None:
    predicted: list[tuple[int, int]] = []

    def prefill_ms(work: Work, decodes: Work) -> float:
        predicted.append((work.tokens, decodes.seqs))
        return 0.0

    scheduler = MixedScheduler(64, token_budget=64, max_num_seqs=8, prefill_ms=prefill_ms)
    add(scheduler, 10, start=0, number=0)
    step(scheduler)
    add(scheduler, 20, start=1, number=1)
    add(scheduler, 30, start=2, number=2)
    assert predicted == [(10, 0), (20, 0), (30, 1)]


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    scheduler = create_scheduler(token_budget=4)
    for number in range(6):
        add(scheduler, 3, start=number, number=number)
    for _ in range(12):
        chunks = step(scheduler)
        assert sum(count for _, _, count in chunks) <= 4
    assert len(scheduler.running) == 4
    assert len(step(scheduler)) == 4


class TestBothLanes:
    """While the prefill lane has a prompt, decodes run on only a part of the device."""

    def waiting(self, *lengths: int) -> MixedScheduler:
        scheduler = create_scheduler()
        for number, length in enumerate(lengths):
            add(scheduler, length, start=number, number=number)
        return scheduler

    def schedule(self, scheduler: MixedScheduler) -> tuple[list[str], list[str]]:
        plan = scheduler.schedule_decodes()
        lane = scheduler.schedule_prefills(
            plan, PrefillBudget(BatchLimit(40), lane_chunk=200, mixed_with_lane=BatchLimit(10))
        )
        return [name for name, _, _ in composition(plan)], [name for name, _, _ in composition(lane)]

    def test_beside_a_batch_that_needs_the_whole_device_the_lane_gets_nothing(self) -> None:
        assert self.schedule(self.waiting(30, 100)) == (["0"], [])

    def test_beside_a_prompt_on_the_lane_the_budget_is_smaller(self) -> None:
        assert self.schedule(self.waiting(100, 9, 8)) == (["1"], ["0", "2"])

    def test_a_small_batch_leaves_the_lane_free(self) -> None:
        assert self.schedule(self.waiting(9, 100)) == (["0"], ["1"])


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    starts=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    num_pages=st.integers(8, 30),
    token_budget=st.integers(1, 80),
    max_num_seqs=st.integers(1, 6),
)
def test_invariants_of_every_step(
    lengths: list[int], starts: list[int], num_pages: int, token_budget: int, max_num_seqs: int
) -> None:
    scheduler = create_scheduler(num_pages, token_budget=token_budget, max_num_seqs=max_num_seqs)
    seqs = [add(scheduler, length, starts[i], number=i) for i, length in enumerate(lengths)]
    for _ in range(60):
        before = {seq: seq.num_computed for seq in scheduler.running}
        plan = scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= token_budget
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
        if all(seq.state is SequenceState.FINISHED for seq in seqs):
            break
    for seq in seqs:
        if seq.state is not SequenceState.FINISHED:
            scheduler.pool.release(scheduler.finish(seq))
    assert scheduler.pool.counts().used == 0
    assert (scheduler.waiting.limit.tokens, scheduler.cache.pending.producers()) == (0, {})

"""Running sequences when pages run out."""

from engine.scheduling.sequence import SequenceState
from tests.engine.scheduling.harness import add, create_scheduler, step


def test_when_pages_run_out_the_newest_sequence_gives_up_its_pages_and_claims() -> None:
    scheduler = create_scheduler(num_pages=8, token_budget=200)
    old, new = add(scheduler, 48, start=0, number=0), add(scheduler, 47, start=1, number=1)
    while not scheduler.preemptions:
        step(scheduler)
    assert (old.state, new.state) == (SequenceState.RUNNING, SequenceState.RESUMABLE)
    assert scheduler.waiting.resumable == [new]
    assert set(scheduler.cache.pending.producers().values()) <= {old}


def test_a_single_sequence_without_a_free_page_keeps_its_pages() -> None:
    scheduler = create_scheduler(num_pages=8)
    seq = add(scheduler, 60)
    step(scheduler)
    assert scheduler.pool.reserve(4) is not None
    for _ in range(4):
        step(scheduler)
    assert scheduler.schedule().chunks == []
    assert (seq.state, scheduler.preemptions) == (SequenceState.RUNNING, 0)
    assert scheduler.stuck() is seq

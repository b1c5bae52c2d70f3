"""Where all layers have sliding windows, a running sequence holds only the pages that later tokens attend to."""

from dataclasses import replace

import pytest

from engine.types import PoolCounts
from tests.engine.scheduling.harness import add, create_scheduler, step


def used_and_cached(counts: PoolCounts) -> tuple[int, int]:
    return counts.used, counts.cached


def test_pages_behind_the_window_go_to_the_cache() -> None:
    scheduler = create_scheduler(token_budget=256, window=40)
    seq = add(scheduler, 200)
    step(scheduler)
    # The next token attends to positions 161 to 200; kernels read from 128 on.
    assert used_and_cached(scheduler.pool.counts()) == (13 - 8, 8)
    assert scheduler.table.pages[seq.row].nonzero()[0].tolist() == list(range(8, 13))
    for _ in range(40):
        step(scheduler)
    assert seq.num_computed == 240
    assert seq.num_released == 12  # read from 192 on
    assert used_and_cached(scheduler.pool.counts()) == (3, 12)
    scheduler.pool.release(scheduler.finish(seq))
    scheduler.check_integrity()
    assert used_and_cached(scheduler.pool.counts()) == (0, 15)


@pytest.mark.parametrize("window", [0, 300, 240])
def test_pages_inside_the_window_are_held(window: int) -> None:
    scheduler = create_scheduler(token_budget=256, window=window)
    add(scheduler, 200)
    for _ in range(40):
        step(scheduler)
    assert used_and_cached(scheduler.pool.counts()) == (15, 0)


def test_a_released_prefix_is_found_until_it_is_evicted() -> None:
    scheduler = create_scheduler(20, token_budget=256, window=40)
    first = add(scheduler, 200)
    step(scheduler)
    again = add(scheduler, 200, number=1)
    step(scheduler)
    assert again.cached_tokens == 192
    scheduler.pool.release(scheduler.finish(first) + scheduler.finish(again))

    other = add(scheduler, 310, start=1, number=2)
    for _ in range(3):
        step(scheduler)
    assert other.num_computed > 310
    found = add(scheduler, 200, number=3)
    step(scheduler)
    assert found.cached_tokens < 192
    scheduler.check_integrity()


def test_a_long_output_fits_into_few_pages() -> None:
    scheduler = create_scheduler(32, token_budget=320, window=64)  # pages for 512 tokens
    seqs = [add(scheduler, 100, start=number, number=number) for number in range(3)]
    for _ in range(200):
        step(scheduler)
    assert scheduler.preemptions == 0
    assert [seq.num_computed for seq in seqs] == [299] * 3


def test_forks_share_what_is_held() -> None:
    scheduler = create_scheduler(token_budget=256, window=40)
    seq = add(scheduler, 200)
    step(scheduler)
    for _ in range(3):
        step(scheduler)
    seq.num_tokens -= 1  # the harness has sampled for the first choice already
    child = scheduler.fork(seq, 1, [7])
    scheduler.append(seq, [1])
    assert child.num_released == seq.num_released == 8
    assert scheduler.table.pages_of(child)[:-1] == scheduler.table.pages_of(seq)[:-1]
    scheduler.check_integrity()
    scheduler.pool.release(scheduler.finish(seq))
    for _ in range(80):
        step(scheduler)
    scheduler.pool.release(scheduler.finish(child))
    assert scheduler.pool.counts().used == 0


def test_pages_of_prefill_only_requests_are_held_for_sending() -> None:
    scheduler = create_scheduler(token_budget=256, window=40)
    seq = add(scheduler, 200)
    seq.request = replace(seq.request, prefill_only=True)
    step(scheduler)
    assert used_and_cached(scheduler.pool.counts()) == (13, 0)

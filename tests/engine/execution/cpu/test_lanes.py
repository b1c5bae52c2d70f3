"""Lanes on CPU cores, without a model."""

import queue
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Batch, Sampled
from engine.execution.cpu.lanes import core_quota, make_splits
from engine.execution.executor import Split

NOTHING = np.zeros(0, np.int32)
BATCH = Batch(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, 0, [])


def threads_used(batch: Batch) -> list[Sampled]:
    """Returns torch's number of threads as a token."""
    return [Sampled(torch.get_num_threads())]


@pytest.fixture
def split() -> Split:
    """A split with one core for decodes and three for prefills."""
    return make_splits(threads_used, threads_used, 4)[0]


def test_splits_are_a_few_that_use_all_cores() -> None:
    decode = [
        [round(cores * split.decode.share) for split in make_splits(threads_used, threads_used, cores)]
        for cores in (1, 2, 3, 4, 8, 16)
    ]
    assert decode == [[], [1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [2, 4, 8, 12]]
    assert all(split.prefill.share + split.decode.share == 1 for split in make_splits(threads_used, threads_used, 16))


def test_each_lane_computes_with_its_own_number_of_threads(split: Split) -> None:
    before = torch.get_num_threads()
    for _ in range(3):
        for lane in (split.prefill, split.decode):
            lane.launch(BATCH)
        assert [lane.collect().sampled[0].token_id for lane in (split.prefill, split.decode)] == [3, 1]
    torch.set_num_threads(before)


def test_the_prefill_lane_computes_concurrently_and_calls_back() -> None:
    go_on, called = threading.Event(), threading.Event()

    def wait(batch: Batch) -> list[Sampled]:
        assert go_on.wait(20)
        return [Sampled(7)]

    lane = make_splits(threads_used, wait, 2)[0].prefill
    assert not lane.done()
    lane.launch(BATCH, called.set)
    assert not lane.done()
    go_on.set()
    assert called.wait(20)
    assert lane.done()
    ran = lane.collect()
    assert ran.sampled == [Sampled(7)]
    assert ran.ms > 0
    assert not lane.done()


def test_the_prefill_lane_continues_with_a_queued_step() -> None:
    called: queue.SimpleQueue[None] = queue.SimpleQueue()
    tokens = iter([7, 8])
    lane = make_splits(threads_used, lambda batch: [Sampled(next(tokens))], 2)[0].prefill
    for _ in range(2):
        lane.launch(BATCH, lambda: called.put(None))
    for _ in range(2):
        called.get(timeout=20)
    first, second = lane.collect(), lane.collect()
    assert (first.sampled, second.sampled) == ([Sampled(7)], [Sampled(8)])
    assert second.start_s >= first.start_s + first.ms / 1e3
    assert not lane.done()


def test_errors_on_the_prefill_lane_are_raised_by_collect() -> None:
    called = threading.Event()

    def fail(batch: Batch) -> list[Sampled]:
        raise RuntimeError("out of memory")

    lane = make_splits(threads_used, fail, 2)[0].prefill
    lane.launch(BATCH, called.set)
    assert called.wait(20)
    assert lane.done()
    with pytest.raises(RuntimeError, match="out of memory"):
        lane.collect()


@pytest.mark.parametrize(("content", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("?", None)])
def test_a_containers_cpu_limit_is_read(tmp_path: Path, content: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert core_quota(tmp_path) == cores


def test_without_a_container_there_is_no_cpu_limit(tmp_path: Path) -> None:
    assert core_quota(tmp_path) is None

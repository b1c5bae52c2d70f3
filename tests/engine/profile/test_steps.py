"""Batches of steps, for a fake and a real runner."""

from collections.abc import Sequence

import numpy as np
import pytest

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Work
from engine.execution.executor import Lane, Split
from engine.execution.runner import TorchRunner
from engine.profile.steps import Step, StepBatches, step_timer
from tests.conftest import MakeCheckpoint


class Pool:
    """A runner that only counts copies."""

    num_pages = 40
    vocab_size = 500
    splits: Sequence[Split] = ()

    def __init__(self) -> None:
        self.copied: list[int] = []

    @property
    def full(self) -> Lane:
        raise NotImplementedError

    def copy_page(self, source: int, target: int) -> None:
        self.copied.append(target)

    def settle(self) -> None:
        raise NotImplementedError


def test_work_of_a_step_is_that_of_its_sequences() -> None:
    step = Step.prefill(100, 20) + Step.decode(3, 50)
    assert step.chunks == ((1, 49), (1, 49), (1, 49), (100, 20))
    assert step.work == Work.decode(3, 150) + Work.prefill(100, 20)
    assert step.pages == 3 * 4 + 8


def test_a_batch_has_every_token_in_a_page_of_its_own_sequence() -> None:
    pool = Pool()
    step = Step.decode(3, 50) + Step.prefill(100, 20) + Step.prefill(7)
    batch = StepBatches(pool).make(step)
    assert batch.num_decodes == 3
    assert batch.context_lens.tolist() == [50, 50, 50, 120, 7]
    assert np.diff(batch.query_start).tolist() == [1, 1, 1, 100, 7]
    assert len(batch.token_ids) == len(batch.positions) == 110
    assert len(np.unique(batch.token_ids)) > 80, "alike tokens are computed by the same experts"
    assert batch.token_ids.max() < pool.vocab_size
    pages = [batch.block_tables[s, : -(-context // BLOCK_SIZE)] for s, context in enumerate(batch.context_lens)]
    assert len(np.unique(np.concatenate(pages))) == step.pages
    for s, (tokens, before) in enumerate(step.chunks):
        rows = slice(batch.query_start[s], batch.query_start[s + 1])
        positions = np.arange(before, before + tokens)
        assert batch.positions[rows].tolist() == positions.tolist()
        expected = pages[s][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        assert batch.slots[rows].tolist() == expected.tolist()
        assert batch.samples[s].row == batch.query_start[s + 1] - 1
    assert {array.dtype for array in (batch.token_ids, batch.positions, batch.slots, batch.query_start)} == {
        np.dtype(np.int32)
    }


def test_pages_are_written_to_once_before_they_are_read() -> None:
    pool = Pool()
    batches = StepBatches(pool)
    batches.make(Step.decode(2, 100))
    first = batches.make(Step.decode(2, 100)).block_tables
    assert sorted([*pool.copied, first[0, 0]]) == sorted(first.ravel().tolist())
    batches.make(Step.decode(4, 100))
    assert len(pool.copied) == len(set(pool.copied)) == 4 * 7 - 1


def test_two_lanes_get_different_pages() -> None:
    pool, step = Pool(), Step.prefill(200)
    own, other = (StepBatches(pool, skip).make(step).block_tables for skip in (0, step.pages))
    assert not set(own.ravel().tolist()) & set(other.ravel().tolist())


def test_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="41 pages does not fit into 40"):
        StepBatches(Pool()).make(Step.prefill(41 * BLOCK_SIZE))


def test_a_real_runner_takes_the_batches(checkpoint: MakeCheckpoint) -> None:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=8 << 20, max_model_len=0)
    batches = StepBatches(runner)
    run = step_timer(runner.full, batches)
    for step in (Step.decode(4, 90), Step.prefill(64, 100), Step.decode(3, 40) + Step.prefill(50)):
        assert run(step) > 0
        runner.full.launch(batches.make(step))
        assert len(runner.full.collect().sampled) == len(step.chunks)

"""Sizes and padding of captured steps. test_setup tests their results."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.cuda.graphs import graph_sizes, pad, padding
from tests.engine.fakes import check_batch
from tests.engine.steps import step_of

SPARE = 9


@given(st.integers(1, 600))
def test_no_step_is_padded_by_more_than_half(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    for smaller, larger in pairwise(sizes):
        assert larger <= 2 * smaller
        assert smaller < 16 or larger <= 1.5 * smaller


def test_sizes_of_the_default() -> None:
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_padding_decodes_one_token_on_the_spare_page() -> None:
    batch = step_of([(1, 17), (1, 3)], [[4, 2], [6]]).host
    padded = pad(batch, 4, SPARE)
    assert padded.token_ids.tolist() == [0, 0, 0, 0]
    assert padded.positions.tolist() == [16, 2, 0, 0]
    assert padded.slots.tolist() == [32, 98, SPARE * 16, SPARE * 16]
    assert padded.query_start.tolist() == [0, 1, 2, 3, 4]
    assert padded.context_lens.tolist() == [17, 3, 1, 1]
    assert padded.block_tables[:, :2].tolist() == [[4, 2], [6, 0], [SPARE, 0], [SPARE, 0]]
    assert padded.num_decodes == 4
    assert {array.dtype for array in (padded.token_ids, padded.slots, padded.block_tables)} == {np.dtype(np.int32)}


def test_a_batch_of_a_captured_size_is_not_padded() -> None:
    batch = step_of([(1, 17)], [[4, 2]]).host
    assert pad(batch, 1, SPARE) is batch


def test_a_step_of_padding_alone_is_valid() -> None:
    check_batch(padding(3, SPARE), SPARE + 1)

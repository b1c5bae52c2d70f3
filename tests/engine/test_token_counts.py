import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 9), max_size=60)


@given(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 20))
def test_each_token_is_counted_once_however_a_sequence_grows(pieces: list[list[int]], begin: int) -> None:
    token_counts = TokenCounts()
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        ids, counts = token_counts.of(np.array(tokens, np.int32), begin)
        expected = {token: tokens[begin:].count(token) for token in tokens[begin:]}
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


@given(TOKENS, TOKENS)
def test_a_sequence_that_became_shorter_is_counted_again(longer: list[int], shorter: list[int]) -> None:
    token_counts = TokenCounts()
    token_counts.of(np.array(longer + shorter + [1], np.int32))
    ids, counts = token_counts.of(np.array(longer, np.int32))
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {token: longer.count(token) for token in longer}

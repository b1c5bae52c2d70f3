import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.blocks import (
    BLOCK_SIZE,
    blocks_for,
    extend_hashes,
    hash_root,
    largest_token,
    pack_tokens,
    short_hashes,
    split_hashes,
    unpack_tokens,
)

Tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5 * BLOCK_SIZE)


@given(tokens=Tokens)
def test_hashes_are_the_chained_digests_of_the_full_blocks(tokens: list[int]) -> None:
    parent = hash_root(b"model")
    expected: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = struct.pack(f"<{BLOCK_SIZE}i", *tokens[start : start + BLOCK_SIZE])
        expected.append(blake2b((expected or [parent])[-1] + block, digest_size=16).digest())
    assert extend_hashes(parent, tokens) == expected
    assert extend_hashes(parent, np.array(tokens, dtype=np.int32)) == expected
    assert extend_hashes(parent, pack_tokens(tokens)) == expected


@given(tokens=Tokens)
def test_packed_tokens_are_whole_or_refused(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == struct.pack(f"<{len(tokens)}i", *tokens)
    assert unpack_tokens(packed).tolist() == tokens
    with pytest.raises(ValueError, match="buffer size"):
        unpack_tokens(packed + b"x")


@given(tokens=Tokens, cut=st.integers(0, 5))
def test_a_chain_can_be_extended_later(tokens: list[int], cut: int) -> None:
    root = hash_root(b"model")
    whole = extend_hashes(root, tokens)
    first = extend_hashes(root, tokens[: cut * BLOCK_SIZE])
    rest = extend_hashes(first[-1] if first else root, tokens[len(first) * BLOCK_SIZE :])
    assert first + rest == whole


def test_models_and_tenants_never_share_a_hash() -> None:
    roots = {hash_root(b"a"), hash_root(b"b"), hash_root(b"a", b"tenant"), hash_root(b"a", b"other")}
    assert len(roots) == 4
    assert hash_root(b"ab", b"c") != hash_root(b"a", b"bc")


@given(hashes=st.lists(st.binary(min_size=16, max_size=16)))
def test_joined_hashes_can_be_split(hashes: list[bytes]) -> None:
    assert split_hashes(b"".join(hashes)) == hashes


def test_short_hashes_are_the_first_eight_bytes() -> None:
    assert short_hashes([bytes(range(16)), bytes(range(16, 32))]) == bytes([*range(8), *range(16, 24)])


def test_a_partial_block_needs_a_page_too() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200))
def test_the_largest_token_is_found_in_few_and_in_many(token_ids: list[int]) -> None:
    assert largest_token(pack_tokens(token_ids)) == max(token_ids)
    assert largest_token(pack_tokens([*token_ids, -1])) >= 2**31

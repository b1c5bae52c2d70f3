"""Blocks of tokens and their chained hashes: the name under which a KV page is cached and found.

`hash_i = blake2b-128(hash_{i-1} ‖ tokens of block i as int32 LE)`; `hash_{-1}` is the root, a digest of the
model fingerprint and the tenant's salt, so that equal tokens of different models or tenants never meet.
"""

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
"""Tokens in a block (and in a KV page)."""

POOL_BYTES = 1 << 30
"""Memory of a pool of pages in host memory, where nobody says how much."""

HASH_BYTES = 16

TOKEN_BYTES = 4
"""Of a packed token."""

_FEW_TOKENS = 64
"""As many are looked through before an array operation has begun."""

_BLOCK = np.dtype(f"V{BLOCK_SIZE * TOKEN_BYTES}")
"""A block's packed tokens, as `bytes` object in a list."""


class Tier(IntEnum):
    """Where a worker has a block (values of the wire's Tier)."""

    PAGES = 1
    HOST = 2  # in host memory, and in no page
    NONE = 3


_BLANK = blake2b(digest_size=HASH_BYTES)


def hash_root(fingerprint: bytes, tenant_salt: bytes = b"") -> bytes:
    """The chain's start for one model and one tenant (16 bytes)."""
    return blake2b(len(fingerprint).to_bytes(4, "little") + fingerprint + tenant_salt, digest_size=HASH_BYTES).digest()


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Token ids as int32, little-endian: as they are hashed, and as requests carry them."""
    if isinstance(token_ids, np.ndarray | array):
        return np.asarray(token_ids).astype("<i4").tobytes()
    return struct.pack(f"<{len(token_ids)}i", *token_ids)  # half the time of making an array first


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int32]:
    """Token ids that `pack_tokens` packed; ValueError where a part of one is missing."""
    return np.frombuffer(packed, dtype="<i4")


def largest_token(packed: bytes) -> int:
    """The largest of some packed token ids, at least one; a negative one counts as larger than all others."""
    ids = memoryview(packed).cast("I")
    return max(ids) if len(ids) <= _FEW_TOKENS else int(np.asarray(ids).max())


def extend_hashes(parent: bytes, token_ids: Sequence[int] | npt.NDArray[np.int32] | bytes) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` (bytes: packed ones), chained on from `parent`.

    A partial last block has no hash: the result has an entry of 16 bytes for each full one.
    """
    packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    blocks = np.frombuffer(packed, dtype=_BLOCK, count=len(packed) // _BLOCK.itemsize)
    hashes = []
    for tokens in blocks.tolist():
        block = _BLANK.copy()  # a third faster than a new one
        block.update(parent + tokens)
        parent = block.digest()
        hashes.append(parent)
    return hashes


def split_hashes(joined: bytes) -> list[bytes]:
    """The 16-byte hashes that were sent as one byte string."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def short_hashes(block_hashes: Sequence[bytes]) -> bytes:
    """The first 64 bits of each hash, joined: what cache events and the router's index carry."""
    return memoryview(b"".join(block_hashes)).cast("Q")[::2].tobytes()


def blocks_for(num_tokens: int) -> int:
    """Pages needed to hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)

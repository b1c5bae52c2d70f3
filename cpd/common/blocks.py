"""Blocks of tokens and their chained hashes, by which KV pages are cached and found.

    hash_i  = blake2b-128(hash_{i-1} ‖ tokens of block i as int32 LE)
    hash_-1 = root, a digest of the model fingerprint and the tenant's salt

So models and tenants never share a block, even with equal tokens.
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
"""Default size of a page pool in host memory."""

HASH_BYTES = 16

TOKEN_BYTES = 4
"""Size of a packed token."""

_FEW_TOKENS = 256
"""Up to this many tokens plain Python is faster than numpy."""

_BLOCK = np.dtype(f"V{BLOCK_SIZE * TOKEN_BYTES}")
"""One block of packed tokens; `tolist` gives `bytes` objects."""


class Tier(IntEnum):
    """Where a worker has a block (the wire's Tier)."""

    PAGES = 1
    HOST = 2  # in host memory only
    NONE = 3


_BLANK = blake2b(digest_size=HASH_BYTES)


def hash_root(fingerprint: bytes, tenant_salt: bytes = b"") -> bytes:
    """Returns the root of one model's and tenant's hash chain (16 bytes)."""
    return blake2b(len(fingerprint).to_bytes(4, "little") + fingerprint + tenant_salt, digest_size=HASH_BYTES).digest()


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Packs token ids as int32, little-endian, as they are hashed and sent."""
    if isinstance(token_ids, np.ndarray | array):
        return np.asarray(token_ids).astype("<i4").tobytes()
    return struct.pack(f"<{len(token_ids)}i", *token_ids)  # twice as fast as making an array first


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int32]:
    """Unpacks token ids; ValueError if the last one is incomplete."""
    return np.frombuffer(packed, dtype="<i4")


def largest_token(packed: bytes) -> int:
    """Returns the largest of one or more packed token ids; negative ids count as larger than all others."""
    ids = memoryview(packed).cast("I")
    return max(ids) if len(ids) <= _FEW_TOKENS else int(np.asarray(ids).max())


def extend_hashes(parent: bytes, token_ids: Sequence[int] | npt.NDArray[np.int32] | bytes) -> list[bytes]:
    """Hashes the full blocks of `token_ids` (bytes: packed ones); a partial last block has no hash.

    Args:
        parent: Hash of the block before them, or the root.
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
    """Splits a byte string into its 16-byte hashes."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def short_hashes(block_hashes: Sequence[bytes]) -> bytes:
    """Returns the first 64 bits of each hash, joined, for cache events and the router's index."""
    return memoryview(b"".join(block_hashes)).cast("Q")[::2].tobytes()


def blocks_for(num_tokens: int) -> int:
    """Returns the number of pages that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)

"""Which worker has cached which blocks, by the 64 bits of their hashes that cache events carry."""

from collections.abc import Mapping, Sequence

import numpy as np

from cpd.blocks import short_hash


class PrefixIndex:
    """The cached blocks of every worker, as of its last event."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}

    def reset(self, worker_id: str) -> None:
        """The worker has announced nothing (a new session begins)."""
        self._blocks[worker_id] = set()

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._blocks.pop(worker_id, None)

    def add(self, worker_id: str, hashes: bytes) -> None:
        """The worker has cached these blocks (8 bytes each)."""
        self._blocks[worker_id].update(_split(hashes))

    def remove(self, worker_id: str, hashes: bytes) -> None:
        """The worker has evicted these blocks (8 bytes each)."""
        self._blocks[worker_id].difference_update(_split(hashes))

    def size(self, worker_id: str) -> int:
        """Number of blocks that the worker has cached."""
        return len(self._blocks.get(worker_id, ()))

    def cached_prefixes(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of the leading blocks (hashes of 16 bytes each) every worker has cached."""
        shorts = [short_hash(block_hash) for block_hash in block_hashes]
        return {worker_id: _prefix(shorts, blocks) for worker_id, blocks in self._blocks.items()}


def _prefix(hashes: Sequence[int], blocks: set[int]) -> int:
    for count, block_hash in enumerate(hashes):
        if block_hash not in blocks:
            return count
    return len(hashes)


def _split(hashes: bytes) -> list[int]:
    found: list[int] = np.frombuffer(hashes, dtype="<u8").tolist()
    return found

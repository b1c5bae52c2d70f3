"""Chooses the waiting sequence that may start next, and its pages."""

from collections.abc import Callable
from typing import NamedTuple

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.performance.model import Work
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue

Fits = Callable[[Work], bool]
"""True if a prompt with this work may be computed now, in chunks or as a whole."""


class AdmissionLimits(NamedTuple):
    """Limits for sequences that start.

    Attributes:
        rows: Number of free rows.
        headroom: Number of pages that must stay available.
        version: The scheduler's version.
    """

    rows: int
    headroom: int
    version: int


class Admitted(NamedTuple):
    """A sequence that starts.

    Attributes:
        pages: Pages for all its tokens, already held.
        cached_tokens: Number of its first tokens that need not be computed.
        found: Number of its first blocks that were found in the cache.
    """

    seq: Sequence
    pages: list[int]
    cached_tokens: int
    found: int


class WaitsForPrefix(NamedTuple):
    """A sequence whose next blocks have a producer; `block` is the last of them."""

    seq: Sequence
    block: bytes


class Admission:
    """Takes the sequences that can start out of the waiting queue."""

    def __init__(self, waiting: WaitingQueue, cache: KVCacheManager) -> None:
        self._waiting = waiting
        self._cache = cache

    def first(self, now: float, limits: AdmissionLimits) -> Sequence | None:
        """The sequence to start next; None if there is none, or if it is known not to fit at this version."""
        seq = self._waiting.first(now)
        if seq is None or self._waiting.is_blocked(seq, limits.version):
            return None
        if limits.rows <= 0:
            self._waiting.block(seq, limits.version)
            return None
        return seq

    def take_next(self, fits: Fits, now: float, limits: AdmissionLimits) -> Admitted | WaitsForPrefix | None:
        """Takes the next sequence out, to start or to wait for its prefix. Returns None if no sequence can start now.

        A sequence whose work does not fit waits for the prefill lane; others may pass it.
        """
        seq = self.first(now, limits)
        if seq is None:
            return None
        found, awaited = self._cache.find(seq.hashes, seq.num_tokens, limits.headroom)
        if awaited is not None:
            self._waiting.take(seq)
            return WaitsForPrefix(seq, awaited)
        if not fits(_work(seq, found)):
            return self._take_passing(seq, fits, now, limits)
        return self._admit(seq, found, limits)

    def _take_passing(self, first: Sequence, fits: Fits, now: float, limits: AdmissionLimits) -> Admitted | None:
        """Admits a sequence whose work fits, while `first` waits for the prefill lane.

        `first` does not start later for it: a row and all the pages that it may need stay available, and when the lane
        becomes free does not depend on the sequences that pass.
        """
        if limits.rows < 2:
            return None
        left = self._cache.pool.available - limits.headroom - blocks_for(first.num_tokens) - 1
        for seq in self._waiting.passing(now):
            # First by its work when it came, which is cheap to know.
            if not fits(seq.work) or blocks_for(seq.num_tokens) > left:
                continue
            found = self._cache.pool.find(seq.hashes)
            if not fits(_work(seq, found)):
                continue
            if self._cache.pending.last_shared(seq.hashes, len(found)) is None:
                return self._admit(seq, found, limits)
        return None

    def _admit(self, seq: Sequence, found: list[int], limits: AdmissionLimits) -> Admitted | None:
        """Admits a sequence whose first blocks are in the pages `found`. Returns None if there are too few pages."""
        pages = self._cache.allocate(found, seq.num_tokens, limits.headroom)
        if pages is None:
            self._waiting.block(seq, limits.version)
            return None
        self._waiting.take(seq)
        return Admitted(seq, pages, min(len(found) * BLOCK_SIZE, seq.num_tokens - 1), len(found))


def _work(seq: Sequence, found: list[int]) -> Work:
    """The work of a sequence whose first blocks are cached in these pages."""
    uncached = max(1, seq.num_tokens - len(found) * BLOCK_SIZE)
    return Work.prefill(uncached, seq.num_tokens - uncached)

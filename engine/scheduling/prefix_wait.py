"""Blocks that are being computed, received or loaded, so that no block is computed twice.

A filler (a running sequence, a landing, or a load from host memory) claims the blocks that it will publish. A sequence
whose next block has a filler waits for it here. It is woken when the block is published, or when the filler gives up;
it then continues after the last valid block. A filler never waits, so there are no chains of waiters.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class PendingBlocks(Generic[W]):
    """The filler and the waiters of each pending block. `W` is the type of the waiters."""

    def __init__(self) -> None:
        self._filler: dict[bytes, Hashable] = {}
        self._claims: dict[Hashable, list[bytes]] = {}
        self._waiters: dict[bytes, list[W]] = {}
        self._waits_for: dict[W, bytes] = {}

    def claim(self, filler: Hashable, hashes: Sequence[bytes]) -> None:
        """Makes `filler` the filler of these blocks, except those that another one has claimed."""
        claimed = [block_hash for block_hash in hashes if block_hash not in self._filler]
        self._filler.update(dict.fromkeys(claimed, filler))
        self._claims[filler] = claimed

    def last_shared(self, hashes: Sequence[bytes], first: int) -> bytes | None:
        """The last block from index `first` on that the filler of block `first` fills without a gap.

        Returns None if block `first` has no filler.
        """
        filler = self._filler.get(hashes[first]) if first < len(hashes) else None
        if filler is None:
            return None
        last = first
        while last + 1 < len(hashes) and self._filler.get(hashes[last + 1]) is filler:
            last += 1
        return hashes[last]

    def is_filled(self, block_hash: bytes) -> bool:
        """True if this block has a filler."""
        return block_hash in self._filler

    def wait(self, waiter: W, block_hash: bytes) -> None:
        """Adds a waiter, to be returned when this pending block is published or given up."""
        self._waiters.setdefault(block_hash, []).append(waiter)
        self._waits_for[waiter] = block_hash

    def stop_waiting(self, waiter: W) -> None:
        """Removes a waiter."""
        block_hash = self._waits_for.pop(waiter)
        self._waiters[block_hash].remove(waiter)
        if not self._waiters[block_hash]:
            del self._waiters[block_hash]

    def published(self, hashes: Iterable[bytes]) -> list[W]:
        """Removes published blocks. Returns their waiters."""
        woken: list[W] = []
        for block_hash in hashes:
            self._filler.pop(block_hash, None)
            if block_hash in self._waiters:
                woken += self._waiters.pop(block_hash)
        for waiter in woken:
            del self._waits_for[waiter]
        return woken

    def give_up(self, filler: Hashable) -> list[W]:
        """Removes the blocks that `filler` has claimed and not published. Returns their waiters."""
        claims = self._claims.pop(filler, ())
        return self.published([block_hash for block_hash in claims if self._filler.get(block_hash) is filler])

    def waiting(self) -> list[W]:
        """All waiters."""
        return list(self._waits_for)

    @property
    def num_waiting(self) -> int:
        """The number of waiters."""
        return len(self._waits_for)

    def fillers(self) -> dict[bytes, Hashable]:
        """The filler of each pending block."""
        return dict(self._filler)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        for block_hash, waiters in self._waiters.items():
            if block_hash not in self._filler:
                raise AssertionError("a sequence waits for a block that has no filler")
            if not waiters or any(self._waits_for[waiter] != block_hash for waiter in waiters):
                raise AssertionError("the records of waiters disagree")
        if sum(map(len, self._waiters.values())) != len(self._waits_for):
            raise AssertionError("a sequence waits in two places or nowhere")
        for block_hash, filler in self._filler.items():
            if block_hash not in self._claims.get(filler, ()):
                raise AssertionError("a pending block is not among its filler's claims")

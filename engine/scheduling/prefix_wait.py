"""Blocks that are being computed, received or loaded, so that no block is computed twice.

A producer (a running sequence, a landing, or a load from host memory) claims the blocks that it will publish. A
sequence whose next block has a producer waits for it here. It is woken when the block is published, or when the
producer gives up; it then continues after the last valid block. A producer never waits, so there are no chains of
waiters.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class PendingBlocks(Generic[W]):
    """The producer and the waiters of each pending block. `W` is the type of the waiters."""

    def __init__(self) -> None:
        self._producer: dict[bytes, Hashable] = {}
        self._claims: dict[Hashable, list[bytes]] = {}
        self._waiters: dict[bytes, list[W]] = {}
        self._waits_for: dict[W, bytes] = {}

    def claim(self, producer: Hashable, hashes: Sequence[bytes]) -> None:
        """Makes `producer` the producer of these blocks, except those that another one has claimed."""
        claimed = [block_hash for block_hash in hashes if block_hash not in self._producer]
        self._producer.update(dict.fromkeys(claimed, producer))
        self._claims[producer] = claimed

    def last_shared(self, hashes: Sequence[bytes], first: int) -> bytes | None:
        """The last block from index `first` on that the producer of block `first` has claimed without a gap.

        Returns None if block `first` has no producer.
        """
        producer = self._producer.get(hashes[first]) if first < len(hashes) else None
        if producer is None:
            return None
        last = first
        while last + 1 < len(hashes) and self._producer.get(hashes[last + 1]) is producer:
            last += 1
        return hashes[last]

    def has_producer(self, block_hash: bytes) -> bool:
        """True if this block has a producer."""
        return block_hash in self._producer

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
            self._producer.pop(block_hash, None)
            if block_hash in self._waiters:
                woken += self._waiters.pop(block_hash)
        for waiter in woken:
            del self._waits_for[waiter]
        return woken

    def give_up(self, producer: Hashable) -> list[W]:
        """Removes the blocks that `producer` has claimed and not published. Returns their waiters."""
        claims = self._claims.pop(producer, ())
        return self.published([block_hash for block_hash in claims if self._producer.get(block_hash) is producer])

    def waiting(self) -> list[W]:
        """All waiters."""
        return list(self._waits_for)

    @property
    def num_waiting(self) -> int:
        """The number of waiters."""
        return len(self._waits_for)

    def producers(self) -> dict[bytes, Hashable]:
        """The producer of each pending block."""
        return dict(self._producer)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree."""
        for block_hash, waiters in self._waiters.items():
            if block_hash not in self._producer:
                raise AssertionError("a sequence waits for a block that has no producer")
            if not waiters or any(self._waits_for[waiter] != block_hash for waiter in waiters):
                raise AssertionError("the records of waiters disagree")
        if sum(map(len, self._waiters.values())) != len(self._waits_for):
            raise AssertionError("a sequence waits in two places or nowhere")
        for block_hash, producer in self._producer.items():
            if block_hash not in self._claims.get(producer, ()):
                raise AssertionError("a pending block is not among its producer's claims")

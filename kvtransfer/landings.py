"""What a receiver has agreed to, the same for every transport.

A landing's page goes  expected -> begun -> arrived.  The landing itself:

    open ──── all pages arrived ───────▶ complete
     ├─────── revoke() ────────────────▶ revoked     nothing new begins
     └─────── sender or transport gone ▶ failed      nothing new begins

It is *settled*, its pages are safe from writes, when it is not open and no page is begun. Only then may its
pages be in another landing.

`expect` and `revoke` come from the event loop while a transport's own thread begins and ends arrivals: every
change happens under the book's lock.
"""

import asyncio
import threading
from collections.abc import Hashable, Sequence
from enum import Enum

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.latch import Latch


class LandingState(Enum):
    OPEN = "open"
    COMPLETE = "complete"
    REVOKED = "revoked"
    FAILED = "failed"


class BookedLanding:
    """One reservation (implements `kvtransfer.base.Landing`). Made and changed by its `LandingBook`."""

    def __init__(
        self,
        book: "LandingBook",
        loop: asyncio.AbstractEventLoop,
        reservation: int,
        generation: int,
        pages: Sequence[int],
    ) -> None:
        self.reservation = reservation
        self.generation = generation
        self.pages = tuple(pages)
        self.state = LandingState.OPEN
        self.error = ""
        self.sender: Hashable | None = None
        self.taken = bytearray(len(self.pages))  # by index, 1: begun or arrived
        self.begun = 0
        self.arrived = 0
        self._book = book
        self._over = Latch(loop)
        self._settled = Latch(loop)

    @property
    def settled(self) -> bool:
        return self.state is not LandingState.OPEN and self.begun == 0

    async def done(self) -> None:
        await self._over.wait()
        if self.state is not LandingState.COMPLETE:
            raise TransferError(self.error)

    def revoke(self) -> bool:
        return self._book.revoke(self)

    async def peer_gone(self) -> None:
        await self._settled.wait()

    def announce(self) -> None:
        """Wakes the waiters for whom something has come true. Any thread; may be repeated."""
        if self.state is not LandingState.OPEN:
            self._over.set()
        if self.settled:
            self._settled.set()


class LandingBook:
    """All landings of one pool.

    Attributes:
        closed: Whether there will be no more.

    Args:
        loop: Where landings are awaited.
        num_pages: Of the pool.
        epoch: Of the pool.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_pages: int, epoch: int) -> None:
        self._loop = loop
        self._num_pages = num_pages
        self._epoch = epoch
        self._lock = threading.Lock()
        self._unsettled: dict[int, BookedLanding] = {}  # by reservation
        self._unsettled_pages: set[int] = set()
        self.closed = False

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> BookedLanding:
        """See `kvtransfer.base.Transport.expect`."""
        landing = BookedLanding(self, self._loop, reservation, generation, pages)
        wanted = set(landing.pages)
        if len(wanted) != len(landing.pages):
            raise ValueError(f"reservation {reservation} names a page twice")
        if wanted and not (min(wanted) >= 0 and max(wanted) < self._num_pages):
            raise ValueError(f"reservation {reservation} names a page outside the pool of {self._num_pages} pages")
        with self._lock:
            if self.closed:
                raise TransferError("the transport is closed")
            if reservation in self._unsettled:
                raise ValueError(f"reservation {reservation} is still open")
            if shared := wanted & self._unsettled_pages:
                raise ValueError(f"page {min(shared)} is still open to writes of another landing")
            self._unsettled[reservation] = landing
            self._unsettled_pages |= wanted
            if not wanted:
                landing.state = LandingState.COMPLETE
                self._forget_if_settled(landing)
        landing.announce()
        return landing

    def begin(
        self, sender: Hashable, epoch: int, reservation: int, generation: int, runs: Sequence[tuple[int, int]]
    ) -> BookedLanding:
        """Admits arrivals: from here on these pages are being written, until `finish` or `lost`.

        Args:
            sender: The connection they come over.
            runs: (index, count): the landing's pages index .. index + count - 1, which must be neighbours in the pool.

        Raises:
            StaleTransferError: Epoch, reservation or generation is not current.
            TransferError: An index is out of range, was named before, or a run's pages are not neighbours.
        """
        with self._lock:
            if epoch != self._epoch:
                raise StaleTransferError(f"the pool's epoch is {self._epoch}, the ticket's {epoch}")
            landing = self._unsettled.get(reservation)
            if landing is None or landing.state is not LandingState.OPEN:
                raise StaleTransferError(f"reservation {reservation} is not open")
            if generation != landing.generation:
                raise StaleTransferError(
                    f"reservation {reservation} has generation {landing.generation}, the ticket {generation}"
                )
            if landing.sender is not None and landing.sender != sender:
                raise TransferError(f"reservation {reservation} belongs to another connection")
            landing.taken = _taken_with(landing, runs)
            landing.begun += sum(count for _, count in runs)
            landing.sender = sender
            return landing

    def finish(self, landing: BookedLanding, count: int) -> None:
        """`count` begun pages have arrived."""
        with self._lock:
            landing.begun -= count
            landing.arrived += count
            if landing.state is LandingState.OPEN and landing.arrived == len(landing.pages):
                landing.state = LandingState.COMPLETE
            self._forget_if_settled(landing)
        landing.announce()

    def give_up(self, sender: Hashable, reason: str) -> None:
        """Fails a connection's landings; pages that have begun may still be written until it is `lost`."""
        self._fail(sender, reason, gone=False)

    def lost(self, sender: Hashable, reason: str) -> None:
        """A connection is gone, and nothing can be written through it any more."""
        self._fail(sender, reason, gone=True)

    def _fail(self, sender: Hashable, reason: str, *, gone: bool) -> None:
        with self._lock:
            landings = [landing for landing in self._unsettled.values() if landing.sender == sender]
            for landing in landings:
                if gone:
                    landing.begun = 0
                self._end(landing, LandingState.FAILED, reason)
        for landing in landings:
            landing.announce()

    def revoke(self, landing: BookedLanding) -> bool:
        """Lets nothing new begin. Returns whether the landing is settled."""
        with self._lock:
            self._end(landing, LandingState.REVOKED, "the landing was revoked")
            settled = landing.settled
        landing.announce()
        return settled

    def close(self, reason: str) -> None:
        """Ends all landings; those with pages begun settle when their connection is `lost`."""
        with self._lock:
            self.closed = True
            landings = list(self._unsettled.values())
            for landing in landings:
                self._end(landing, LandingState.FAILED, reason)
        for landing in landings:
            landing.announce()

    def _end(self, landing: BookedLanding, state: LandingState, reason: str) -> None:
        if landing.state is LandingState.OPEN:
            landing.state, landing.error = state, reason
        self._forget_if_settled(landing)

    def _forget_if_settled(self, landing: BookedLanding) -> None:
        if landing.settled and self._unsettled.get(landing.reservation) is landing:
            del self._unsettled[landing.reservation]
            self._unsettled_pages.difference_update(landing.pages)


def _taken_with(landing: BookedLanding, runs: Sequence[tuple[int, int]]) -> bytearray:
    pages = landing.pages
    taken = bytearray(landing.taken)
    for index, count in runs:
        if count < 1 or index < 0 or index + count > len(pages):
            raise TransferError(f"index {index + count - 1} is outside the landing of {len(pages)} pages")
        if any(taken[index : index + count]):
            raise TransferError(f"a page at index {index} to {index + count - 1} of the landing was pushed before")
        if count > 1 and pages[index : index + count] != tuple(range(pages[index], pages[index] + count)):
            raise TransferError(f"the pages at index {index} to {index + count - 1} of the landing are not neighbours")
        taken[index : index + count] = b"\x01" * count
    return taken

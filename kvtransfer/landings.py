"""The receiver's side of all reservations, shared by all transports.

A landing's page goes  expected -> begun -> arrived.  The landing itself:

    open ──── all pages arrived ───────▶ complete
     ├─────── revoke() ────────────────▶ revoked     nothing new begins
     └─────── sender or transport gone ▶ failed      nothing new begins

A landing is *settled* when it is not open and no page is begun: its pages are safe from writes. Only then may another
landing reserve the same bytes.

The event loop calls `expect` and `revoke` while a transport's thread begins and finishes arrivals. Every change happens
under the table's lock.
"""

import asyncio
import threading
from collections.abc import Hashable, Sequence
from enum import Enum

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.base import PoolMemory, Segment
from kvtransfer.latch import Latch
from kvtransfer.segments import layout_of, problem_with


class LandingState(Enum):
    OPEN = "open"
    COMPLETE = "complete"
    REVOKED = "revoked"
    FAILED = "failed"


class LandingEntry:
    """One reservation (implements `kvtransfer.base.Landing`). Created and changed by its `LandingTable`."""

    def __init__(
        self,
        table: "LandingTable",
        loop: asyncio.AbstractEventLoop,
        reservation: int,
        generation: int,
        pages: Sequence[int],
        segments: Sequence[Segment],
    ) -> None:
        self.reservation = reservation
        self.generation = generation
        self.pages = tuple(pages)
        self.segments = tuple(segments)
        self.layout = layout_of(segments)
        self.state = LandingState.OPEN
        self.error = ""
        self.sender: Hashable | None = None
        self.taken = bytearray(len(self.pages))  # by index, 1 if begun or arrived
        self.begun = 0
        self.arrived = 0
        self._table = table
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
        return self._table.revoke(self)

    async def peer_gone(self) -> None:
        await self._settled.wait()

    def announce(self) -> None:
        """Wakes those who wait for the present state. May be called from any thread, and repeatedly."""
        if self.state is not LandingState.OPEN:
            self._over.set()
        if self.settled:
            self._settled.set()


class LandingTable:
    """All landings of one pool.

    Attributes:
        closed: True if there will be no more landings.

    Args:
        loop: Event loop on which landings are awaited.
        memory: The pool.
        epoch: Epoch of the pool.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: PoolMemory, epoch: int) -> None:
        self._loop = loop
        self._memory = memory
        self._epoch = epoch
        self._lock = threading.Lock()
        self._unsettled: dict[int, LandingEntry] = {}  # by reservation
        self._unsettled_pages: set[int] = set()
        self.closed = False

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment]
    ) -> LandingEntry:
        """See `kvtransfer.base.Transport.expect`."""
        landing = LandingEntry(self, self._loop, reservation, generation, pages, segments)
        wanted = set(landing.pages)
        if len(wanted) != len(landing.pages):
            raise ValueError(f"reservation {reservation} names a page twice")
        if wanted and not (min(wanted) >= 0 and max(wanted) < self._memory.num_pages):
            raise ValueError(
                f"reservation {reservation} names a page outside the pool of {self._memory.num_pages} pages"
            )
        if problem := problem_with(landing.segments, self._memory.page_bytes):
            raise ValueError(f"reservation {reservation} names segments that {problem}")
        with self._lock:
            if self.closed:
                raise TransferError("the transport is closed")
            if reservation in self._unsettled:
                raise ValueError(f"reservation {reservation} is still open")
            if conflicts := self._conflicting_pages(landing, wanted):
                raise ValueError(f"page {min(conflicts)} is still open to writes of another landing")
            self._unsettled[reservation] = landing
            self._unsettled_pages |= wanted
            if not wanted:
                landing.state = LandingState.COMPLETE
                self._changed(landing)
        return landing

    def begin(
        self,
        sender: Hashable,
        epoch: int,
        reservation: int,
        generation: int,
        runs: Sequence[tuple[int, int]],
        layout: int = 0,
    ) -> LandingEntry:
        """Admits arrivals: from now on these pages are being written, until `finish` or `fail`.

        Args:
            sender: The connection the pages arrive over.
            runs: (index, count): the landing's pages index .. index + count - 1, contiguous in the pool.
            layout: See `kvtransfer.segments.layout_of`.

        Raises:
            StaleTransferError: Epoch, reservation or generation is not current.
            TransferError: An index is out of range, was named before, a run's pages are not contiguous, or the sender
                would write other segments.
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
            if layout != landing.layout:
                raise TransferError(f"reservation {reservation} expects other segments of its pages than the ticket")
            landing.taken = _taken_with(landing, runs)
            landing.begun += sum(count for _, count in runs)
            landing.sender = sender
            return landing

    def finish(self, landing: LandingEntry, count: int) -> None:
        """Records that `count` begun pages have arrived."""
        with self._lock:
            landing.begun -= count
            landing.arrived += count
            if landing.state is LandingState.OPEN and landing.arrived == len(landing.pages):
                landing.state = LandingState.COMPLETE
            self._changed(landing)

    def fail(self, sender: Hashable, reason: str, *, gone: bool) -> None:
        """Fails a connection's landings. Begun pages may still be written until the connection is gone."""
        with self._lock:
            for landing in [each for each in self._unsettled.values() if each.sender == sender]:
                if gone:
                    landing.begun = 0
                self._end(landing, LandingState.FAILED, reason)

    def revoke(self, landing: LandingEntry) -> bool:
        """Lets nothing new begin. Returns True if the landing is settled."""
        with self._lock:
            self._end(landing, LandingState.REVOKED, "the landing was revoked")
            return landing.settled

    def close(self, reason: str) -> None:
        """Ends all landings. Those with begun pages settle when their connection is gone."""
        with self._lock:
            self.closed = True
            for landing in list(self._unsettled.values()):
                self._end(landing, LandingState.FAILED, reason)

    def _end(self, landing: LandingEntry, state: LandingState, reason: str) -> None:
        if landing.state is LandingState.OPEN:
            landing.state, landing.error = state, reason
        self._changed(landing)

    def _changed(self, landing: LandingEntry) -> None:
        """Forgets the landing if it is settled, and wakes those who wait for its state."""
        if landing.settled and self._unsettled.get(landing.reservation) is landing:
            del self._unsettled[landing.reservation]
            self._unsettled_pages.difference_update(landing.pages)
            if landing.segments:  # others may hold other segments of the same pages
                for other in self._unsettled.values():
                    self._unsettled_pages.update(other.pages if other.segments else ())
        landing.announce()

    def _conflicting_pages(self, landing: LandingEntry, wanted: set[int]) -> set[int]:
        """The pages with bytes that an unsettled landing has reserved, too."""
        shared, conflicts = wanted & self._unsettled_pages, set[int]()
        for other in self._unsettled.values() if shared else ():
            parts = landing.segments and other.segments and landing.segments + other.segments
            if not parts or problem_with(parts, self._memory.page_bytes):
                conflicts |= shared.intersection(other.pages)
        return conflicts


def _taken_with(landing: LandingEntry, runs: Sequence[tuple[int, int]]) -> bytearray:
    pages = landing.pages
    taken = bytearray(landing.taken)
    for index, count in runs:
        if count < 1 or index < 0 or index + count > len(pages):
            raise TransferError(f"index {index + count - 1} is outside the landing of {len(pages)} pages")
        if any(taken[index : index + count]):
            raise TransferError(f"a page at index {index} to {index + count - 1} of the landing was pushed before")
        if count > 1 and pages[index : index + count] != tuple(range(pages[index], pages[index] + count)):
            raise TransferError(f"the pages at index {index} to {index + count - 1} of the landing are not contiguous")
        taken[index : index + count] = b"\x01" * count
    return taken

"""The sender's side of a push, shared by all transports."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory, Ticket
from kvtransfer.latch import Latch
from kvtransfer.segments import Run, layout_of, problem_with


class PushedTransfer:
    """One push (implements `kvtransfer.base.Transfer`). Its runs wait, are in flight in batches, then have arrived.

    Everything but `done` and `cancel` belongs to the transport's thread.

    Args:
        ticket: The receiver's reservation.
        runs: What to send, in this order.
        call: Runs a function on the transport's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticket: Ticket,
        runs: deque[Run],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.ticket = ticket
        self.layout = layout_of(ticket.segments)
        self.waiting = runs
        self.in_flight = 0  # batches
        self.error: TransferError | None = None
        self._call = call
        self._over = Latch(loop)
        self._announce()

    @property
    def over(self) -> bool:
        return not self.waiting and self.in_flight == 0

    async def done(self) -> None:
        await self._over.wait()
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def cancel(self) -> None:
        self._call(lambda: self.stop(TransferError("the transfer was cancelled")))

    def take_batch(self, max_runs: int, max_pages: int) -> list[Run]:
        """Takes the next runs to send, at least one. They are in flight until `arrived`, `refused` or `lost`."""
        runs = [self.waiting.popleft()]
        room = max_pages - runs[0].count
        while self.waiting and len(runs) < max_runs and (room := room - self.waiting[0].count) >= 0:
            runs.append(self.waiting.popleft())
        self.in_flight += 1
        return runs

    def arrived(self) -> None:
        """Records that a batch is complete on both sides."""
        self.in_flight -= 1
        self._announce()

    def refused(self, error: TransferError) -> None:
        """Records that the receiver refused a batch; nothing of it was sent, and nothing more will be."""
        self.stop(error)
        self.in_flight -= 1
        self._announce()

    def lost(self, error: TransferError) -> None:
        """Records that the connection is gone and nothing reads the pages any more."""
        self.stop(error)
        self.in_flight = 0
        self._announce()

    def stop(self, error: TransferError) -> None:
        """Sends nothing more. `done` waits for what is in flight, then raises the first error."""
        if self.over:
            return
        self.error = self.error or error
        self.waiting.clear()
        self._announce()

    def _announce(self) -> None:
        if self.over:
            self._over.set()


def prepare_push(
    ticket: Ticket,
    pages: Sequence[tuple[int, int]],
    own: PoolMemory,
    their_page_bytes: int,
    max_pages: int,
    call: Callable[[Callable[[], None]], None] = lambda action: action(),
) -> PushedTransfer:
    """The transfer of a push, in runs of at most `max_pages`. Raises ValueError like `kvtransfer.base.Peer.push`.

    Args:
        call: Runs a function on the transport's thread, if that is not the event loop's.
    """
    _check(ticket, pages, own, their_page_bytes)
    return PushedTransfer(asyncio.get_running_loop(), ticket, merge(ticket, pages, max_pages), call)


def _check(ticket: Ticket, pages: Sequence[tuple[int, int]], own: PoolMemory, their_page_bytes: int) -> None:
    if not all(0 <= number < 1 << 64 for number in (ticket.epoch, ticket.reservation, ticket.generation)):
        raise ValueError(f"a pushed ticket's numbers do not fit 64 bits: {ticket}")
    if not ticket.segments and own.page_bytes != their_page_bytes:
        raise ValueError(f"a whole page was pushed, but pages have {own.page_bytes} and {their_page_bytes} bytes")
    if problem := problem_with(ticket.segments, their_page_bytes):
        raise ValueError(f"a push has segments that {problem}")
    if not all(0 <= part.source <= own.page_bytes - part.num_bytes for part in ticket.segments):
        raise ValueError(f"a push has segments that are not inside own pages of {own.page_bytes} bytes")
    if not pages:
        return
    sources, indices = zip(*pages, strict=True)
    if not (min(sources) >= 0 and max(sources) < own.num_pages):
        raise ValueError(f"a pushed page is outside the pool of {own.num_pages} pages")
    if not (min(indices) >= 0 and max(indices) < len(ticket.pages)):
        raise ValueError(f"a pushed index is outside the ticket of {len(ticket.pages)} pages")
    if len(set(indices)) != len(indices):
        raise ValueError("a push names an index twice")


def merge(ticket: Ticket, pages: Sequence[tuple[int, int]], max_pages: int) -> deque[Run]:
    """Merges contiguous pages of a push into runs of at most `max_pages`, in the order of the push.

    Pages that are sent in segments stay runs of one page.
    """
    max_pages = 1 if ticket.segments else max_pages
    runs: deque[Run] = deque()
    first_page = first_index = count = 0
    for page, index in pages:
        extends = (
            0 < count < max_pages
            and page == first_page + count
            and index == first_index + count
            and ticket.pages[index] == ticket.pages[first_index] + count
        )
        if extends:
            count += 1
            continue
        if count:
            runs.append(Run(first_page, first_index, count))
        first_page, first_index, count = page, index, 1
    if count:
        runs.append(Run(first_page, first_index, count))
    return runs

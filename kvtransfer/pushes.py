"""The sender's side of a push, the same for every transport."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpd.common.errors import TransferError
from kvtransfer.base import Ticket
from kvtransfer.latch import Latch


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that are neighbours in both pools: own `page` … go to the ticket's index `index` …, `count` of them."""

    page: int
    index: int
    count: int


def check_push(ticket: Ticket, pages: Sequence[tuple[int, int]], num_pages: int) -> None:
    """Raises ValueError unless this is what `kvtransfer.base.Peer.push` takes from a pool of `num_pages`."""
    if not all(0 <= number < 1 << 64 for number in (ticket.epoch, ticket.reservation, ticket.generation)):
        raise ValueError(f"a pushed ticket's numbers do not fit 64 bits: {ticket}")
    if not pages:
        return
    own, indices = zip(*pages, strict=True)
    if not (min(own) >= 0 and max(own) < num_pages):
        raise ValueError(f"a pushed page is outside the pool of {num_pages} pages")
    if not (min(indices) >= 0 and max(indices) < len(ticket.pages)):
        raise ValueError(f"a pushed index is outside the ticket of {len(ticket.pages)} pages")
    if len(set(indices)) != len(indices):
        raise ValueError("a push names an index twice")


def merge(ticket: Ticket, pages: Sequence[tuple[int, int]], most: int) -> deque[Run]:
    """The runs of a push, in its order, of at most `most` pages each."""
    runs: deque[Run] = deque()
    first_page = first_index = count = 0
    for page, index in pages:
        extends = (
            0 < count < most
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


class PushedTransfer:
    """One push (implements `kvtransfer.base.Transfer`): its runs wait, are in flight in batches, have arrived.

    All but `done` and `cancel` belong to the transport's thread.

    Args:
        ticket: The receiver's reservation.
        runs: What is to be sent, in this order.
        on_cancel: Called on the loop; has the transport's thread call `stop`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticket: Ticket,
        runs: deque[Run],
        on_cancel: Callable[["PushedTransfer"], None],
    ) -> None:
        self.ticket = ticket
        self.waiting = runs
        self.in_flight = 0  # batches
        self.error: TransferError | None = None
        self._on_cancel = on_cancel
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
        self._on_cancel(self)

    def take_batch(self, max_runs: int, max_pages: int) -> list[Run]:
        """The next runs to be sent, at least one. They are in flight until `arrived`, `refused` or `lost`."""
        runs = [self.waiting.popleft()]
        room = max_pages - runs[0].count
        while self.waiting and len(runs) < max_runs and (room := room - self.waiting[0].count) >= 0:
            runs.append(self.waiting.popleft())
        self.in_flight += 1
        return runs

    def arrived(self) -> None:
        """A batch is complete on both sides."""
        self.in_flight -= 1
        self._announce()

    def refused(self, error: TransferError) -> None:
        """A batch was refused: nothing of it was sent, and nothing more will be."""
        self.stop(error)
        self.in_flight -= 1
        self._announce()

    def lost(self, error: TransferError) -> None:
        """The connection is gone, and nothing reads the pages any more."""
        self.stop(error)
        self.in_flight = 0
        self._announce()

    def stop(self, error: TransferError) -> None:
        """Sends nothing more. `done` waits for what is in flight, then raises the first such error."""
        if self.over:
            return
        self.error = self.error or error
        self.waiting.clear()
        self._announce()

    def _announce(self) -> None:
        if self.over:
            self._over.set()

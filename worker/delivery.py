"""Pages on their way from the own pool into one landing of another worker's.

A page is pinned by whoever hands it in, and unpinned here: when it has arrived, or when it will not be sent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cpd.common.errors import TransferError
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer, PoolMemory, Ticket, Transfer
from kvtransfer.checksums import page_checksums
from worker.convert import InvalidRequestError
from worker.engine_bridge import EngineBridge

RUN_PAGES = 64
"""Sent together: when they have arrived, the caller hears that something moves, and nobody holds them any more."""


@dataclass(slots=True)
class Traffic:
    """Counts the transfers that this worker has completed."""

    completed: int = 0


@dataclass(frozen=True, slots=True)
class Outlet:
    """What all deliveries of a worker share.

    Attributes:
        engine: Unpins the pages.
        memory: Of the own pool.
        traffic: Of all deliveries.
    """

    engine: EngineBridge
    memory: PoolMemory
    traffic: Traffic

    def unpin(self, pages: list[int]) -> None:
        """Nobody reads these pages any more."""
        if pages:
            self.engine.post(lambda engine: engine.unpin(pages))


class Delivery:
    """What one fill sends.

    Args:
        peer: The connection to the pool that the landing is in.
        landing: Where the pages go.
        blocks: Of the prompt, that are to be had here; the landing must end with the last of them.
        checksums: Whether each page's checksum is told.
        tell: Takes what the receiver is told about the pages.
        failed: Called with the reason when pages can't be sent.

    Attributes:
        pages_sent: Pages that have arrived.

    Raises:
        InvalidRequestError: The landing does not fit the prompt.
    """

    def __init__(
        self,
        peer: Peer,
        landing: pb.FillLanding,
        blocks: int,
        *,
        outlet: Outlet,
        checksums: bool,
        tell: Callable[[pb.FillPages], None],
        failed: Callable[[str], None],
    ) -> None:
        self.pages_sent = 0
        self._peer = peer
        self._first_block = landing.first_block
        self._ticket = _ticket(landing, blocks)
        self._outlet = outlet
        self._checksums = checksums
        self._tell = tell
        self._failed = failed
        self._transfers: list[tuple[Transfer, asyncio.Task[None]]] = []

    def push(self, first_block: int, pages: list[int]) -> None:
        """Sends pinned pages with the blocks from `first_block` on; the receiver may have the first of them."""
        there = min(max(self._first_block - first_block, 0), len(pages))
        self._outlet.unpin(pages[:there])
        for start in range(there, len(pages), RUN_PAGES):
            self._push_run(first_block + start - self._first_block, pages[start : start + RUN_PAGES])

    def cancel(self) -> None:
        """Stops as soon as possible."""
        for transfer, _ in self._transfers:
            transfer.cancel()

    async def done(self) -> None:
        """Returns when nothing is in flight. Nothing may be pushed any more."""
        await asyncio.gather(*(task for _, task in self._transfers))

    def _push_run(self, index: int, pages: list[int]) -> None:
        try:
            transfer = self._peer.push(self._ticket, [(page, index + i) for i, page in enumerate(pages)])
        except (TransferError, ValueError) as error:
            self._outlet.unpin(pages)
            self._failed(str(error))
            return
        told = asyncio.create_task(self._say(index, pages))
        self._transfers.append((transfer, asyncio.create_task(self._finish(transfer, told, pages))))

    async def _say(self, index: int, pages: list[int]) -> None:
        """Says which pages are on their way, so that the receiver can check what arrives."""
        checksums = await asyncio.to_thread(page_checksums, self._outlet.memory, pages) if self._checksums else b""
        self._tell(
            pb.FillPages(
                reservation=self._ticket.reservation,
                generation=self._ticket.generation,
                first_block=self._first_block + index,
                pages=len(pages),
                checksums=checksums,
            )
        )

    async def _finish(self, transfer: Transfer, told: asyncio.Task[None], pages: list[int]) -> None:
        try:
            try:
                await told  # it reads the pages, too
            finally:
                await transfer.done()
        except TransferError as error:
            self._failed(str(error))
        else:
            self.pages_sent += len(pages)
            self._outlet.traffic.completed += 1
        finally:
            self._outlet.unpin(pages)


def _ticket(landing: pb.FillLanding, blocks: int) -> Ticket:
    if landing.first_block + len(landing.pages) != blocks:
        raise InvalidRequestError(
            f"the landing has {len(landing.pages)} pages from block {landing.first_block} on, but there are {blocks} "
            "blocks"
        )
    return Ticket(
        epoch=landing.epoch,
        reservation=landing.reservation,
        generation=landing.generation,
        pages=tuple(landing.pages),
    )

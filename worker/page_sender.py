"""Sends pages from this worker's pool into one landing of another worker.

A page is pinned by the caller of `send`, and unpinned here: when it has arrived, or when it will not be sent.
`PageSender.pages_sent` counts a request's arrived pages (bytes: times `page_bytes`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from cpd.common.buckets import TRANSFER_BYTES, TRANSFER_BYTES_PER_S, TRANSFER_S, Buckets
from cpd.common.errors import TransferError
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer, PoolMemory, Ticket, Transfer
from kvtransfer.checksums import page_checksums
from worker.async_engine import AsyncEngine
from worker.wire_format import InvalidRequestError

RUN_PAGES = 64
"""Pages in one transfer. When they have arrived, they are unpinned and the receiver gets a sign of progress."""


@dataclass(slots=True)
class SourcePool:
    """This worker's pool, from which all its page senders send.

    Attributes:
        completed_transfers: Number of transfers, of up to `RUN_PAGES` pages, completed so far.
        sizes, durations, speeds: Their bytes, seconds, and bytes a second.
    """

    engine: AsyncEngine
    memory: PoolMemory
    completed_transfers: int = 0
    sizes: Buckets = field(default_factory=lambda: Buckets(TRANSFER_BYTES))
    durations: Buckets = field(default_factory=lambda: Buckets(TRANSFER_S))
    speeds: Buckets = field(default_factory=lambda: Buckets(TRANSFER_BYTES_PER_S))

    def completed(self, pages: int, seconds: float) -> None:
        """Counts a transfer that has arrived `seconds` after it began."""
        num_bytes = pages * self.memory.page_bytes
        self.completed_transfers += 1
        self.sizes.add(num_bytes)
        self.durations.add(seconds)
        self.speeds.add(num_bytes / max(seconds, 1e-9))

    def add_load(self, load: pb.Load) -> None:
        """Adds the completed transfers."""
        if self.completed_transfers:
            load.transfers.CopyFrom(
                pb.Transfers(
                    bytes=_on_wire(self.sizes), seconds=_on_wire(self.durations), bytes_per_second=_on_wire(self.speeds)
                )
            )

    def unpin(self, pages: list[int]) -> None:
        """Unpins pages that are no longer read."""
        if pages:
            self.engine.post(lambda engine: engine.unpin(pages))


class PageSender:
    """Sends the pages of one prefill request.

    Args:
        peer: The connection to the receiver's pool.
        landing: The receiver's pages.
        blocks: Number of blocks here, counted from the prompt's start; the landing must end with the last of them.
        checksums: Announce each page's checksum.
        announce: Tells the receiver which pages are being sent.
        failed: Called with the reason when pages can't be sent.

    Attributes:
        pages_sent: Pages that have arrived.

    Raises:
        InvalidRequestError: The landing does not fit the prompt.
    """

    def __init__(
        self,
        peer: Peer,
        landing: pb.PrefillLanding,
        blocks: int,
        *,
        source: SourcePool,
        checksums: bool,
        announce: Callable[[pb.PrefillPages], None],
        failed: Callable[[str], None],
    ) -> None:
        self.pages_sent = 0
        self._peer = peer
        self._first_block = landing.first_block
        self._ticket = _ticket(landing, blocks)
        self._source = source
        self._checksums = checksums
        self._announce = announce
        self._failed = failed
        self._transfers: list[tuple[Transfer, asyncio.Task[None]]] = []

    def send(self, first_block: int, pages: list[int]) -> None:
        """Sends pinned pages with the blocks from `first_block` on, except blocks that the receiver already has."""
        skipped = min(max(self._first_block - first_block, 0), len(pages))
        self._source.unpin(pages[:skipped])
        for start in range(skipped, len(pages), RUN_PAGES):
            self._send_run(first_block + start - self._first_block, pages[start : start + RUN_PAGES])

    def cancel(self) -> None:
        """Stops as soon as possible."""
        for transfer, _ in self._transfers:
            transfer.cancel()

    async def done(self) -> None:
        """Returns when nothing is in flight. Send no more pages after this call."""
        await asyncio.gather(*(task for _, task in self._transfers))

    def _send_run(self, index: int, pages: list[int]) -> None:
        try:
            transfer = self._peer.push(self._ticket, [(page, index + i) for i, page in enumerate(pages)])
        except (TransferError, ValueError) as error:
            self._source.unpin(pages)
            self._failed(str(error))
            return
        began = asyncio.get_running_loop().time()
        announced = asyncio.create_task(self._announce_run(index, pages))
        self._transfers.append((transfer, asyncio.create_task(self._finish(transfer, announced, pages, began))))

    async def _announce_run(self, index: int, pages: list[int]) -> None:
        checksums = await asyncio.to_thread(page_checksums, self._source.memory, pages) if self._checksums else b""
        self._announce(
            pb.PrefillPages(
                reservation=self._ticket.reservation,
                generation=self._ticket.generation,
                first_block=self._first_block + index,
                pages=len(pages),
                checksums=checksums,
            )
        )

    async def _finish(self, transfer: Transfer, announced: asyncio.Task[None], pages: list[int], began: float) -> None:
        try:
            try:
                await announced  # it reads the pages, too
            finally:
                await transfer.done()
        except TransferError as error:
            self._failed(str(error))
        else:
            self.pages_sent += len(pages)
            self._source.completed(len(pages), asyncio.get_running_loop().time() - began)
        finally:
            self._source.unpin(pages)


def _on_wire(buckets: Buckets) -> pb.Histogram:
    return pb.Histogram(counts=buckets.counts, sum=buckets.sum)


def _ticket(landing: pb.PrefillLanding, blocks: int) -> Ticket:
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

"""The sender's side of a connection: the batches it pushes.

A batch:  offered -> granted (the transport writes it) -> arrived. It has arrived when nothing reads its pages any more
(`sent`) and the receiver has said Done, in either order. Or it is refused.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cpd.common.errors import TransferError
from kvtransfer.base import Segment
from kvtransfer.pushes import PushedTransfer
from kvtransfer.segments import Run
from kvtransfer.session import limits
from kvtransfer.session.frames import Done, Grant, Offer, Refuse, refusal


@dataclass(slots=True)
class _Batch:
    transfer: PushedTransfer
    runs: list[Run]
    granted: bool = False
    sent: bool = False
    acknowledged: bool = False


class Sending:
    """What one connection sends. For the thread that drives the connection.

    Args:
        max_runs: Most runs of a batch.
        max_pages: Most pages of a batch.
    """

    def __init__(self, *, max_runs: int, max_pages: int) -> None:
        self._max_runs = max_runs
        self._max_pages = max_pages
        self._transfers: deque[PushedTransfer] = deque()
        self._batches: dict[int, _Batch] = {}
        self._numbers = itertools.count()
        self._lost: TransferError | None = None

    @property
    def busy(self) -> bool:
        """True if an offered batch is not done: the receiver may believe that it is being written."""
        return bool(self._batches)

    def submit(self, transfer: PushedTransfer) -> None:
        """Queues a transfer. After `lost` it fails at once."""
        if self._lost is not None:
            transfer.lost(self._lost)
        else:
            self._transfers.append(transfer)

    def offers(self) -> Iterator[Offer]:
        """Takes the offers that can be sent now."""
        while self._transfers and len(self._batches) < limits.WINDOW:
            transfer = self._transfers[0]
            if not transfer.waiting:
                self._transfers.popleft()
                continue
            number, ticket = next(self._numbers), transfer.ticket
            runs = transfer.take_batch(self._max_runs, self._max_pages)
            self._batches[number] = _Batch(transfer, runs)
            indices = tuple((run.index, run.count) for run in runs)
            yield Offer(number, ticket.epoch, ticket.reservation, ticket.generation, indices, layout=transfer.layout)

    def granted(self, grant: Grant) -> tuple[list[Run], tuple[Segment, ...]]:
        """The runs to send to the grant's places, and the segments of their pages (empty for whole pages).

        Raises:
            TransferError: The batch is not waiting for a grant; `refused` and `done` raise it likewise.
        """
        batch = self._batch(grant.batch, granted=False)
        if len(grant.places) != len(batch.runs):
            raise TransferError(f"the receiver granted {len(grant.places)} runs of {len(batch.runs)} that were offered")
        batch.granted = True
        return batch.runs, batch.transfer.ticket.segments

    def refused(self, frame: Refuse) -> None:
        """Ends the batch's transfer."""
        self._batch(frame.batch, granted=False).transfer.refused(refusal(frame))
        del self._batches[frame.batch]

    def done(self, frame: Done) -> None:
        """Records that the receiver has counted the batch."""
        self._batch(frame.batch, granted=True).acknowledged = True
        self._settle(frame.batch)

    def sent(self, number: int) -> None:
        """Records that all of the batch has been sent and nothing reads its pages any more."""
        self._batches[number].sent = True
        self._settle(number)

    def patience(self, *, is_open: bool) -> float | None:
        """How many seconds the receiver may be inactive. None if nothing is expected of it."""
        given_up = any(batch.transfer.error for batch in self._batches.values())
        return limits.patience(is_open=is_open, owes=self.busy, given_up=given_up)

    def stop(self, error: TransferError) -> None:
        """Offers nothing more."""
        for transfer in self._transfers:
            transfer.stop(error)

    def lost(self, error: TransferError) -> None:
        """Records that the connection is gone and nothing reads the pages any more."""
        self._lost = error
        for transfer in [*self._transfers, *(batch.transfer for batch in self._batches.values())]:
            transfer.lost(error)
        self._transfers.clear()
        self._batches.clear()

    def _batch(self, number: int, *, granted: bool) -> _Batch:
        batch = self._batches.get(number)
        if batch is None or batch.granted is not granted or batch.acknowledged:
            raise TransferError(f"the receiver named batch {number} out of turn")
        return batch

    def _settle(self, number: int) -> None:
        batch = self._batches[number]
        if batch.sent and batch.acknowledged:
            del self._batches[number]
            batch.transfer.arrived()

"""The sender's side of a connection: what it pushes, in batches.

A batch:  offered -> granted (the transport sends it) -> arrived, when nothing reads its pages any more (`sent`) and
the receiver said Done, in either order. Or refused.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cpd.common.errors import TransferError
from kvtransfer.pushes import PushedTransfer, Run
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
    """What one connection sends, for the thread that drives it.

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

    @property
    def busy(self) -> bool:
        """Whether a batch was offered that the receiver has not said to have: for all it knows, it may be under way."""
        return bool(self._batches)

    def submit(self, transfer: PushedTransfer) -> None:
        """Has a transfer offered after those before it."""
        self._transfers.append(transfer)

    def offers(self) -> Iterator[Offer]:
        """What is to be offered now."""
        while self._transfers and len(self._batches) < limits.WINDOW:
            transfer = self._transfers[0]
            if not transfer.waiting:
                self._transfers.popleft()
                continue
            number, ticket = next(self._numbers), transfer.ticket
            runs = transfer.take_batch(self._max_runs, self._max_pages)
            self._batches[number] = _Batch(transfer, runs)
            indices = tuple((run.index, run.count) for run in runs)
            yield Offer(number, ticket.epoch, ticket.reservation, ticket.generation, indices)

    def granted(self, grant: Grant) -> list[Run]:
        """The runs that may be sent, to the places of the grant. Raises TransferError if it may not come now."""
        batch = self._at_issue(grant.batch, granted=False)
        if len(grant.places) != len(batch.runs):
            raise TransferError("the receiver granted another number of runs than was offered")
        batch.granted = True
        return batch.runs

    def refused(self, frame: Refuse) -> None:
        """Raises TransferError if it may not come now."""
        self._at_issue(frame.batch, granted=False).transfer.refused(refusal(frame))
        del self._batches[frame.batch]

    def done(self, frame: Done) -> None:
        """Raises TransferError if it may not come now."""
        self._at_issue(frame.batch, granted=True).acknowledged = True
        self._settle(frame.batch)

    def sent(self, number: int) -> None:
        """Nothing reads the batch's pages any more, and all of them have been sent."""
        self._batches[number].sent = True
        self._settle(number)

    def patience(self, *, is_open: bool) -> float | None:
        """How long the receiver may do nothing, in seconds. None: it owes nothing."""
        given_up = any(batch.transfer.error for batch in self._batches.values())
        return limits.patience(is_open=is_open, owes=self.busy, given_up=given_up)

    def stop(self, error: TransferError) -> None:
        """Nothing more is offered."""
        for transfer in self._transfers:
            transfer.stop(error)

    def lost(self, error: TransferError) -> None:
        """The connection is gone, and nothing reads the pages any more."""
        for transfer in [*self._transfers, *(batch.transfer for batch in self._batches.values())]:
            transfer.lost(error)
        self._transfers.clear()
        self._batches.clear()

    def _at_issue(self, number: int, *, granted: bool) -> _Batch:
        batch = self._batches.get(number)
        if batch is None or batch.granted is not granted or batch.acknowledged:
            raise TransferError("the receiver spoke of a batch that is not at issue")
        return batch

    def _settle(self, number: int) -> None:
        batch = self._batches[number]
        if batch.sent and batch.acknowledged:
            del self._batches[number]
            batch.transfer.arrived()

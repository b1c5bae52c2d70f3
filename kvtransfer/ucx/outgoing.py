"""The sender's end of a connection.

    greeting ── Welcome ──▶ open ──▶ failed

A batch of a push: offered -> granted (its messages are posted) -> arrived, when the receiver said Done and UCX no
longer reads its pages.
"""

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cpd.errors import TransferError
from kvtransfer.latch import Latch
from kvtransfer.pushes import PushedTransfer, Run
from kvtransfer.ucx import wire
from kvtransfer.ucx.connection import GRACE_S, GREETING_S, STALL_S, Connection, pop_completed
from kvtransfer.ucx.reactor import Reactor

WINDOW = 4  # batches offered and not done
_BATCH_BYTES = 8 << 20


@dataclass(slots=True)
class _Batch:
    transfer: PushedTransfer
    runs: list[Run]
    granted: bool = False
    acknowledged: bool = False
    requests: deque[Any] = field(default_factory=deque)


class Outgoing(Connection):
    """Sends pages of one pool to the transport at the other end.

    Args:
        pool: All pages' bytes.
        page_bytes: Of one page.
        key: From the receiver's address.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: Any,
        loop: asyncio.AbstractEventLoop,
        pool: memoryview,
        page_bytes: int,
        key: bytes,
    ) -> None:
        super().__init__(reactor, endpoint)
        self.greeted = Latch(loop)  # open or failed
        self.gone = Latch(loop)
        self.error: TransferError | None = None
        self._pool = pool
        self._page_bytes = page_bytes
        self._open = False
        self._transfers: deque[PushedTransfer] = deque()
        self._batches: dict[int, _Batch] = {}
        self._numbers = itertools.count()
        self._send(wire.Hello(key, page_bytes))

    def submit(self, transfer: PushedTransfer) -> None:
        """Sends a transfer after those before it."""
        if self.failed:
            transfer.lost(self.error or TransferError("the connection is closed"))
            return
        self._transfers.append(transfer)  # the poll that follows offers it
        self._moved_at = time.monotonic()

    def _offer(self) -> bool:
        offered = False
        while self._transfers and len(self._batches) < WINDOW:
            transfer = self._transfers[0]
            if not transfer.waiting:
                self._transfers.popleft()
                continue
            number, ticket = next(self._numbers), transfer.ticket
            runs = transfer.take_batch(wire.MAX_RUNS, _BATCH_BYTES // self._page_bytes)
            self._batches[number] = _Batch(transfer, runs)
            indices = tuple((run.index, run.count) for run in runs)
            self._send(wire.Offer(number, ticket.epoch, ticket.reservation, ticket.generation, indices))
            offered = True
        return offered

    def _handle(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Welcome() if not self._open:
                self._open = True
                self.greeted.set()
            case wire.Reject() if not self._open:
                self.error = wire.refusal(frame.stale, frame.reason)
                raise self.error
            case wire.Grant():
                self._grant(self._batch(frame.batch, granted=False), frame.tag)
            case wire.Refuse():
                self._batch(frame.batch, granted=False).transfer.refused(wire.refusal(frame.stale, frame.reason))
                del self._batches[frame.batch]
            case wire.Done():
                self._batch(frame.batch, granted=True).acknowledged = True
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _batch(self, number: int, *, granted: bool) -> _Batch:
        batch = self._batches.get(number)
        if batch is None or batch.granted is not granted or batch.acknowledged:
            raise TransferError("the receiver spoke of a batch that is not at issue")
        return batch

    def _grant(self, batch: _Batch, tag: int) -> None:
        batch.granted = True
        for k, run in enumerate(batch.runs):
            start = run.page * self._page_bytes
            data = self._pool[start : start + run.count * self._page_bytes]
            batch.requests.append(
                self._endpoint.tag_send(self._reactor.array(data), self._reactor.ucx.UCXXTag(tag + k))
            )

    def _advance(self) -> bool:
        worked = False
        for number, batch in list(self._batches.items()):
            worked |= pop_completed(batch.requests)
            if batch.acknowledged and not batch.requests:
                del self._batches[number]
                batch.transfer.arrived()
                worked = True
        return self._offer() or worked

    def _page_requests(self) -> list[Any]:
        return [request for batch in self._batches.values() for request in batch.requests]

    def _patience(self) -> float | None:
        if not self._open:
            return GREETING_S
        if not self._batches:
            return None
        return GRACE_S if any(batch.transfer.error for batch in self._batches.values()) else STALL_S

    def _lost(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)
        for transfer in [*self._transfers, *(batch.transfer for batch in self._batches.values())]:
            transfer.lost(self.error)
        self._transfers.clear()
        self._batches.clear()
        self.greeted.set()
        self.gone.set()

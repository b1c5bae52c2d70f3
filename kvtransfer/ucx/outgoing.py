"""The sender's end of a connection.

    greeting ── Welcome ──▶ open ──▶ failed

A batch that was granted is one write a run, into the pages of the grant, and a flush. When that is completed the
pages are there, which the receiver can't see: it is told.
"""

import asyncio
import time
from collections import deque
from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.latch import Latch
from kvtransfer.pushes import PushedTransfer
from kvtransfer.session import frames
from kvtransfer.session.sending import Sending
from kvtransfer.ucx.connection import MAX_RUNS, Connection, pop_completed
from kvtransfer.ucx.memory import PeersMemory, Write, unseal
from kvtransfer.ucx.reactor import Reactor

_BATCH_BYTES = 8 << 20


class Outgoing(Connection):
    """Sends pages of one pool to the transport at the other end.

    Args:
        memory: The pool.
        key: From the receiver's address.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: Any,
        loop: asyncio.AbstractEventLoop,
        memory: PoolMemory,
        key: bytes,
    ) -> None:
        super().__init__(reactor, endpoint)
        self.greeted = Latch(loop)  # open or failed
        self.gone = Latch(loop)
        self.error: TransferError | None = None
        self._memory = memory
        self._key = key
        self._theirs: PeersMemory | None = None  # since the connection is open
        self._sending = Sending(max_runs=MAX_RUNS, max_pages=max(1, _BATCH_BYTES // memory.page_bytes))
        self._flying: dict[int, deque[Write]] = {}  # by batch
        self._send(frames.Hello(key, memory.page_bytes))

    def submit(self, transfer: PushedTransfer) -> None:
        """Sends a transfer after those before it."""
        if self.failed:
            transfer.lost(self.error or TransferError("the connection is closed"))
            return
        self._sending.submit(transfer)  # the poll that follows offers it
        self._moved_at = time.monotonic()

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Welcome() if self._theirs is None:
                self._theirs = PeersMemory(self._reactor.ucp, self._endpoint.handle, unseal(frame.details, self._key))
                self.greeted.set()
            case frames.Reject() if self._theirs is None:
                self.error = frames.refusal(frame)
                raise self.error
            case frames.Grant() if self._theirs is not None:
                self._grant(frame, self._theirs)
            case frames.Refuse():
                self._sending.refused(frame)
            case frames.Done():
                self._sending.done(frame)
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _grant(self, grant: frames.Grant, theirs: PeersMemory) -> None:
        runs = self._sending.granted(grant)
        writes = self._flying[grant.batch] = deque()
        start, size = self._memory.pointer, self._memory.page_bytes
        for run, page in zip(runs, grant.places, strict=True):
            writes.append(theirs.write(start + run.page * size, run.count * size, page * size))
        writes.append(theirs.flush())

    def _advance(self) -> bool:
        worked = False
        for batch, requests in list(self._flying.items()):
            worked |= pop_completed(requests)
            if not requests:
                del self._flying[batch]
                self._sending.sent(batch)
                self._send(frames.Sent(batch))
                worked = True
        for offer in self._sending.offers():
            self._send(offer)
            worked = True
        return worked

    def _page_requests(self) -> list[Any]:
        return [request for requests in self._flying.values() for request in requests]

    def _patience(self) -> float | None:
        return self._sending.patience(is_open=self._theirs is not None)

    def _lost(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)
        self._flying.clear()
        if self._theirs is not None:
            self._theirs.close()
        self._sending.lost(self.error)
        self.greeted.set()
        self.gone.set()

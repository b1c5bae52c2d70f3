"""The sender's end of a connection.

    greeting ── Welcome ──▶ open ──▶ failed

A granted batch becomes one write for each contiguous piece of memory, into the granted pages, and a flush. When the
flush is complete the pages have arrived. The receiver can't see that, so the sender reports it.
"""

import asyncio
import time
from collections import deque
from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.latch import Latch
from kvtransfer.pushes import PushedTransfer
from kvtransfer.segments import resolve_runs
from kvtransfer.session import frames
from kvtransfer.session.greeting import SenderGreeting
from kvtransfer.session.sending import Sending
from kvtransfer.ucx.connection import MAX_RUNS, Connection
from kvtransfer.ucx.memory import PeersMemory, Write
from kvtransfer.ucx.reactor import Reactor

_BATCH_BYTES = 8 << 20


class Outgoing(Connection):
    """Sends pages of one pool to the transport at the other end.

    Attributes:
        greeted: Set when the connection is open or has failed.
        gone: Set when nothing reads pages for it any more.
        error: Why it failed.

    Args:
        memory: The pool.
        page_bytes: Page size of the receiver.
        key: From the receiver's address.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: Any,
        loop: asyncio.AbstractEventLoop,
        memory: PoolMemory,
        page_bytes: int,
        key: bytes,
    ) -> None:
        super().__init__(reactor, endpoint)
        self.greeted = Latch(loop)
        self.gone = Latch(loop)
        self.error: TransferError | None = None
        self._memory = memory
        self._page_bytes = page_bytes
        self._theirs: PeersMemory | None = None  # set when the connection is open
        self._sending = Sending(max_runs=MAX_RUNS, max_pages=max(1, _BATCH_BYTES // memory.page_bytes))
        self._writes: dict[int, deque[Write]] = {}  # in flight, by batch
        self._greeting = SenderGreeting(key, page_bytes)
        self._send(self._greeting.hello)

    def submit(self, transfer: PushedTransfer) -> None:
        """Queues a transfer."""
        self._sending.submit(transfer)  # the poll that follows offers it
        self._moved_at = time.monotonic()

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Welcome() if self._theirs is None:
                proof = self._greeting.answer(frame)
                self._theirs = PeersMemory(self._reactor.ucp, self._endpoint.handle, frame.details, self._page_bytes)
                self._send(proof)
                self.greeted.set()
            case frames.Reject() if self._theirs is None:
                self.error = frames.refusal(frame)
                raise self.error
            case frames.Grant() if self._theirs is not None:
                self._write(frame, self._theirs)
            case frames.Refuse():
                self._sending.refused(frame)
            case frames.Done():
                self._sending.done(frame)
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _write(self, grant: frames.Grant, theirs: PeersMemory) -> None:
        runs, segments = self._sending.granted(grant)
        writes = self._writes[grant.batch] = deque()
        pieces = resolve_runs(self._memory, theirs.pool, runs, grant.places, segments)
        for source, target, num_bytes in zip(*(each.tolist() for each in pieces), strict=True):
            writes.append(theirs.write(source, target, num_bytes))
        writes.append(theirs.flush())

    def _advance(self) -> bool:
        worked = False
        for batch, writes in list(self._writes.items()):
            while writes and writes[0].completed:
                writes.popleft().check_error()
                worked = True
            if not writes:
                del self._writes[batch]
                self._sending.sent(batch)
                self._send(frames.Sent(batch))
        for offer in self._sending.offers():
            self._send(offer)
            worked = True
        return worked

    def _page_requests(self) -> list[Any]:
        return [write for writes in self._writes.values() for write in writes]

    def _patience(self) -> float | None:
        return self._sending.patience(is_open=self._theirs is not None)

    def _lost(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)
        self._writes.clear()
        if self._theirs is not None:
            self._theirs.close()
        self._sending.lost(self.error)
        self.greeted.set()
        self.gone.set()

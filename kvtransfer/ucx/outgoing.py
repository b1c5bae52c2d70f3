"""The sender's end of a connection.

    greeting ── Welcome ──▶ open ──▶ failed

A batch that was granted is one message a run. It has been sent when UCX no longer reads its pages.
"""

import asyncio
import time
from collections import deque
from typing import Any

from cpd.errors import TransferError
from kvtransfer.latch import Latch
from kvtransfer.pushes import PushedTransfer
from kvtransfer.session import frames
from kvtransfer.session.sending import Sending
from kvtransfer.ucx.connection import MAX_RUNS, Connection, pop_completed
from kvtransfer.ucx.reactor import Reactor

_BATCH_BYTES = 8 << 20


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
        self._sending = Sending(max_runs=MAX_RUNS, max_pages=max(1, _BATCH_BYTES // page_bytes))
        self._flying: dict[int, deque[Any]] = {}  # requests, by batch
        self._send(frames.Hello(key, page_bytes))

    def submit(self, transfer: PushedTransfer) -> None:
        """Sends a transfer after those before it."""
        if self.failed:
            transfer.lost(self.error or TransferError("the connection is closed"))
            return
        self._sending.submit(transfer)  # the poll that follows offers it
        self._moved_at = time.monotonic()

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Welcome() if not self._open:
                self._open = True
                self.greeted.set()
            case frames.Reject() if not self._open:
                self.error = frames.refusal(frame)
                raise self.error
            case frames.Grant():
                self._grant(frame)
            case frames.Refuse():
                self._sending.refused(frame)
            case frames.Done():
                self._sending.done(frame)
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _grant(self, grant: frames.Grant) -> None:
        requests = self._flying[grant.batch] = deque()
        for run, tag in zip(self._sending.granted(grant), grant.places, strict=True):
            start = run.page * self._page_bytes
            data = self._pool[start : start + run.count * self._page_bytes]
            requests.append(self._endpoint.tag_send(self._reactor.array(data), self._reactor.ucx.UCXXTag(tag)))

    def _advance(self) -> bool:
        worked = False
        for batch, requests in list(self._flying.items()):
            worked |= pop_completed(requests)
            if not requests:
                del self._flying[batch]
                self._sending.sent(batch)
                worked = True
        for offer in self._sending.offers():
            self._send(offer)
            worked = True
        return worked

    def _page_requests(self) -> list[Any]:
        return [request for requests in self._flying.values() for request in requests]

    def _patience(self) -> float | None:
        return self._sending.patience(is_open=self._open)

    def _lost(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)
        self._flying.clear()
        self._sending.lost(self.error)
        self.greeted.set()
        self.gone.set()

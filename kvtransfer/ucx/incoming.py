"""The receiver's end of a connection.

greeting ── Hello ──▶ open ──────▶ failed
    └── wrong Hello ─▶ rejected ─────┘      lingers so that the sender can read why
"""

import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpd.errors import StaleTransferError, TransferError
from kvtransfer.landings import BookedLanding, LandingBook, LandingState
from kvtransfer.ucx import wire
from kvtransfer.ucx.connection import GRACE_S, GREETING_S, STALL_S, Connection, pop_completed
from kvtransfer.ucx.outgoing import WINDOW
from kvtransfer.ucx.reactor import Reactor


@dataclass(slots=True)
class _Batch:
    number: int
    landing: BookedLanding
    num_pages: int
    requests: deque[Any]


class Incoming(Connection):
    """Receives pages into one pool from the transport at the other end.

    Args:
        pool: All pages' bytes.
        page_bytes: Of one page.
        key: Of this transport's address.
        tags: Tags nobody has used; each batch takes one and the MAX_RUNS - 1 that follow it.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: Any,
        book: LandingBook,
        pool: memoryview,
        page_bytes: int,
        key: bytes,
        tags: Iterator[int],
    ) -> None:
        super().__init__(reactor, endpoint)
        self._book = book
        self._pool = pool
        self._page_bytes = page_bytes
        self._key = key
        self._tags = tags
        self._open = False
        self._batches: list[_Batch] = []

    def _handle(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Hello() if not self._open:
                self._greet(frame)
            case wire.Offer() if self._open and len(self._batches) < WINDOW:
                self._admit(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _greet(self, hello: wire.Hello) -> None:
        if not hmac.compare_digest(hello.key, self._key):
            self._send(wire.Reject(stale=True, reason="another transport has this address now"))
        elif hello.page_bytes != self._page_bytes:
            sizes = f"the sender's pages have {hello.page_bytes} bytes, the receiver's {self._page_bytes}"
            self._send(wire.Reject(stale=False, reason=f"{sizes}: both must serve the same model and dtype"))
        else:
            self._open = True
            self._send(wire.Welcome())

    def _admit(self, offer: wire.Offer) -> None:
        try:
            landing = self._book.begin(self, offer.epoch, offer.reservation, offer.generation, offer.runs)
        except TransferError as error:
            self._send(wire.Refuse(offer.batch, isinstance(error, StaleTransferError), str(error)))
            return
        tag = next(self._tags)
        requests: deque[Any] = deque()
        for k, (index, count) in enumerate(offer.runs):
            start = landing.pages[index] * self._page_bytes
            data = self._pool[start : start + count * self._page_bytes]
            requests.append(self._endpoint.tag_recv(self._reactor.array(data), self._reactor.ucx.UCXXTag(tag + k)))
        num_pages = sum(count for _, count in offer.runs)
        self._batches.append(_Batch(offer.batch, landing, num_pages, requests))
        self._send(wire.Grant(offer.batch, tag))

    def _advance(self) -> bool:
        worked = False
        for batch in list(self._batches):
            worked |= pop_completed(batch.requests)
            if not batch.requests:
                self._batches.remove(batch)
                self._book.finish(batch.landing, batch.num_pages)
                self._send(wire.Done(batch.number))
                worked = True
        return worked

    def _page_requests(self) -> list[Any]:
        return [request for batch in self._batches for request in batch.requests]

    def _patience(self) -> float | None:
        if not self._open:
            return GREETING_S
        if not self._batches:
            return None
        given_up = any(batch.landing.state is not LandingState.OPEN for batch in self._batches)
        return GRACE_S if given_up else STALL_S

    def _lost(self, reason: str) -> None:
        self._batches.clear()
        self._book.lost(self, reason)

"""The receiver's end of a connection.

greeting ── Hello ──▶ open ──────▶ failed
    └── wrong Hello ─▶ rejected ─────┘      lingers so that the sender can read why
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from cpd.errors import TransferError
from kvtransfer.landings import LandingBook
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving
from kvtransfer.ucx.connection import MAX_RUNS, Connection, pop_completed
from kvtransfer.ucx.reactor import Reactor


class Incoming(Connection):
    """Receives pages into one pool from the transport at the other end.

    Args:
        pool: All pages' bytes.
        page_bytes: Of one page.
        key: Of this transport's address.
        tags: Tags nobody has used; a message takes one.
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
        self._receiving = Receiving(book, self, key, page_bytes)
        self._tags = tags
        self._open = False
        self._landing: dict[int, deque[Any]] = {}  # requests, by batch

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Hello() if not self._open:
                rejection = self._receiving.rejection(frame)
                self._open = rejection is None
                self._send(rejection or frames.Welcome())
            case frames.Offer() if self._open and len(frame.runs) <= MAX_RUNS:
                self._admit(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _admit(self, offer: frames.Offer) -> None:
        landing = self._receiving.admit(offer)
        if isinstance(landing, frames.Refuse):
            self._send(landing)
            return
        requests = self._landing[offer.batch] = deque()
        tags = tuple(next(self._tags) for _ in offer.runs)
        for tag, (index, count) in zip(tags, offer.runs, strict=True):
            start = landing.pages[index] * self._page_bytes
            data = self._pool[start : start + count * self._page_bytes]
            requests.append(self._endpoint.tag_recv(self._reactor.array(data), self._reactor.ucx.UCXXTag(tag)))
        self._send(frames.Grant(offer.batch, tags))

    def _advance(self) -> bool:
        worked = False
        for batch, requests in list(self._landing.items()):
            worked |= pop_completed(requests)
            if not requests:
                del self._landing[batch]
                self._receiving.arrived(batch)
                self._send(frames.Done(batch))
                worked = True
        return worked

    def _page_requests(self) -> list[Any]:
        return [request for requests in self._landing.values() for request in requests]

    def _patience(self) -> float | None:
        return self._receiving.patience(is_open=self._open)

    def _lost(self, reason: str) -> None:
        self._landing.clear()
        self._receiving.through()
        self._book.lost(self, reason)

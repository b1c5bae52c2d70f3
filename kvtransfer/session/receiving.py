"""The receiver's side of a connection: who may connect, and the batches that were granted to it."""

import hmac
from collections.abc import Hashable
from dataclasses import dataclass

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.landings import BookedLanding, LandingBook, LandingState
from kvtransfer.session import limits
from kvtransfer.session.frames import Hello, Offer, Over, Refuse, Reject


@dataclass(frozen=True, slots=True)
class _Batch:
    landing: BookedLanding
    num_pages: int


class Receiving:
    """What one connection receives, for the thread that drives it.

    Args:
        book: Of the pool's landings.
        sender: The connection, as the book names it.
        key: Of this transport's address.
        page_bytes: Of the pool.
    """

    def __init__(self, book: LandingBook, sender: Hashable, key: bytes, page_bytes: int) -> None:
        self._book = book
        self._sender = sender
        self._key = key
        self._page_bytes = page_bytes
        self._batches: dict[int, _Batch] = {}

    @property
    def busy(self) -> bool:
        """Whether a batch was granted that has not arrived."""
        return bool(self._batches)

    @property
    def num_bytes(self) -> int:
        """Of the batches that were granted and have not arrived."""
        return self._page_bytes * sum(batch.num_pages for batch in self._batches.values())

    def rejection(self, opening: Hello | Over) -> Reject | None:
        """Why the sender may not connect, or not tell anything; None if it may."""
        if not hmac.compare_digest(opening.key, self._key):
            return Reject(True, "another transport has this address now")
        if isinstance(opening, Over):
            return None
        if self._book.closed:
            return Reject(False, "the transport was closed")
        if opening.page_bytes != self._page_bytes:
            sizes = f"the sender's pages have {opening.page_bytes} bytes, the receiver's {self._page_bytes}"
            return Reject(False, f"{sizes}: both must serve the same model and dtype")
        return None

    def admit(self, offer: Offer) -> BookedLanding | Refuse:
        """The landing in which the batch's pages are being written from here on, or why they may not be.

        Raises:
            TransferError: The sender may not offer this now.
        """
        if len(self._batches) >= limits.WINDOW or offer.batch in self._batches:
            raise TransferError("the sender sent Offer out of turn")
        try:
            landing = self._book.begin(self._sender, offer.epoch, offer.reservation, offer.generation, offer.runs)
        except TransferError as error:
            return Refuse(offer.batch, isinstance(error, StaleTransferError), str(error))
        self._batches[offer.batch] = _Batch(landing, sum(count for _, count in offer.runs))
        return landing

    def arrived(self, number: int) -> None:
        """Every page of the batch is there. Raises TransferError if it was not granted, or has arrived before."""
        batch = self._batches.pop(number, None)
        if batch is None:
            raise TransferError("the sender spoke of a batch that is not at issue")
        self._book.finish(batch.landing, batch.num_pages)

    def patience(self, *, is_open: bool) -> float | None:
        """How long the sender may do nothing, in seconds. None: it owes nothing."""
        given_up = any(batch.landing.state is not LandingState.OPEN for batch in self._batches.values())
        return limits.patience(is_open=is_open, owes=self.busy, given_up=given_up)

    def through(self) -> None:
        """Nothing of what was granted is being written any more; what has not arrived never will."""
        self._batches.clear()

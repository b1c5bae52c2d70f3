"""The receiver's side of a connection: who may connect, and which batches were granted."""

from collections.abc import Hashable
from dataclasses import dataclass

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.base import Segment
from kvtransfer.landings import LandingEntry, LandingState, LandingTable
from kvtransfer.session import limits
from kvtransfer.session.frames import CloseNotice, Grant, Hello, Offer, Proof, Refuse, Reject, Welcome
from kvtransfer.session.greeting import ReceiverGreeting


@dataclass(frozen=True, slots=True)
class _Batch:
    landing: LandingEntry
    num_pages: int


class Receiving:
    """What one connection receives. For the thread that drives the connection.

    Args:
        table: The pool's landings.
        sender: Names the connection in the table.
        key: Key of this transport's address.
        page_bytes: Page size of the pool.
    """

    def __init__(self, table: LandingTable, sender: Hashable, key: bytes, page_bytes: int) -> None:
        self._table = table
        self._sender = sender
        self._greeting = ReceiverGreeting(key)
        self._page_bytes = page_bytes
        self._batches: dict[int, _Batch] = {}

    @property
    def busy(self) -> bool:
        """True if a granted batch has not arrived."""
        return bool(self._batches)

    @property
    def num_bytes(self) -> int:
        """Bytes granted that have not arrived, counting whole pages."""
        return self._page_bytes * sum(batch.num_pages for batch in self._batches.values())

    def rejection(self, opening: Hello | CloseNotice) -> Reject | None:
        """Why the sender may not connect or give notice. None if it may."""
        if not self._greeting.knows_key(opening):
            return Reject(True, "another transport has this address now")
        if isinstance(opening, CloseNotice):
            return None
        if self._table.closed:
            return Reject(False, "the transport was closed")
        if opening.page_bytes != self._page_bytes:
            return Reject(False, page_size_problem(opening.page_bytes, self._page_bytes))
        return None

    def welcome(self, hello: Hello, details: bytes) -> Welcome:
        """The answer to a Hello that is not rejected."""
        return self._greeting.welcome(hello, details)

    def check(self, proof: Proof) -> None:
        """Lets the sender offer pages. Raises TransferError if it does not know the key."""
        self._greeting.check(proof)

    def admit(self, offer: Offer) -> Grant | Refuse:
        """The answer to an offer. Once it is a grant, the batch's pages are being written.

        Raises:
            TransferError: The sender has offered more than it may, or has not proved that it knows the key.
        """
        if not self._greeting.proved:
            raise TransferError("the sender sent Offer before its Proof")
        if len(self._batches) >= limits.WINDOW or offer.batch in self._batches:
            raise TransferError("the sender sent Offer out of turn")
        try:
            landing = self._table.begin(
                self._sender, offer.epoch, offer.reservation, offer.generation, offer.runs, offer.layout
            )
        except TransferError as error:
            return Refuse(offer.batch, isinstance(error, StaleTransferError), str(error))
        self._batches[offer.batch] = _Batch(landing, sum(count for _, count in offer.runs))
        return Grant(offer.batch, tuple(landing.pages[index] for index, _ in offer.runs))

    def segments(self, number: int) -> tuple[Segment, ...]:
        """The segments of the pages of a granted batch. Empty for whole pages."""
        return self._batches[number].landing.segments

    def arrived(self, number: int) -> None:
        """Records that a batch has arrived. Raises TransferError if it was not granted, or has arrived before."""
        batch = self._batches.pop(number, None)
        if batch is None:
            raise TransferError(f"the sender named batch {number}, which is not granted")
        self._table.finish(batch.landing, batch.num_pages)

    def patience(self, *, is_open: bool) -> float | None:
        """How many seconds the sender may be inactive. None if nothing is expected of it."""
        given_up = any(batch.landing.state is not LandingState.OPEN for batch in self._batches.values())
        return limits.patience(is_open=is_open, owes=self.busy, given_up=given_up)

    def stopped(self) -> None:
        """Records that no granted batch is being written any more; what has not arrived never will."""
        self._batches.clear()


def page_size_problem(expected: int, actual: int) -> str:
    """The error text when a sender expects pages of another size than the receiver has."""
    return f"the sender expects pages of {expected} bytes, the receiver's have {actual}: both must serve the same model"

"""The transport protocol: pages of a sender's pool appear in pages that a receiver has set aside.

    receiver (decode worker)                      sender (prefill worker)
    address = transport.address
    landing = transport.expect(r, g, pages)
                      ── address, r, g, epoch, pages by some other wire ──▶
                                                  peer = await transport.connect(address)
                                                  transfer = peer.push(ticket, [(page, index), …])   any number of times
    await landing.done()                          await transfer.done()

Who may touch what, and when:
- Receiver's pages: from `expect` on they may be written at any time until `landing.done()` returned, or until
  `landing.revoke()` returned True. If `revoke()` returns False a write may still be under way: quarantine the
  pages until the sender has said that nothing is in flight, or `landing.peer_gone()` returned.
- Sender's pages: read from `push` on until `transfer.done()` returned or raised. They must not change meanwhile.
- Epoch (one a pool creation) and generation (one a reservation) guard messages: a push whose ticket is not
  current is refused with StaleTransferError at the sender, and nothing is written.

All coroutine methods and `push` are called on one event loop; no method blocks it. Memory is the caller's: it
outlives the transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Route = Literal["memory", "network"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a transfer takes: `fixed_ms`, and a millisecond for every `bytes_per_ms`."""

    fixed_ms: float
    bytes_per_ms: float


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A page pool: `num_pages` pages of `page_bytes`, back to back from `pointer`.

    Attributes:
        device: Whose memory it is: a CUDA device, as this process numbers them. None: the host's.
    """

    pointer: int
    num_pages: int
    page_bytes: int
    device: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """The receiver's reservation, as the sender must quote it.

    Attributes:
        epoch: Of the receiver's pool.
        reservation: Names the landing.
        generation: Tells this use of the landing's pages from earlier ones.
        pages: The receiver's page for each index.
    """

    epoch: int
    reservation: int
    generation: int
    pages: tuple[int, ...]


class Landing(Protocol):
    """The receiver's side of one reservation. The first connection that pushes to it is its only sender."""

    async def done(self) -> None:
        """Returns when every page of the ticket has arrived.

        Raises:
            TransferError: The sender's connection broke or stalled, or the landing was revoked.
        """

    def revoke(self) -> bool:
        """Refuses whatever has not begun to arrive. True: nothing can be written any more. Idempotent.

        A landing that is complete stays complete.
        """

    async def peer_gone(self) -> None:
        """Returns when it is certain that no write into these pages is under way or can begin.

        For a landing that was revoked, failed or completed. A sender that makes no progress is cut off after a few
        seconds, so this ends even when the sender is stopped; unless it writes from its own process straight into
        this one's memory (nixl, on one machine): then it ends when the sender continues, or is gone.
        """


class Transfer(Protocol):
    """The sender's side of one push."""

    async def done(self) -> None:
        """Returns when the pages have arrived at the receiver; the sender's pages may be reused.

        Raises:
            StaleTransferError: The receiver refused the ticket.
            TransferError: The connection broke or stalled, or the transfer was cancelled. The pages may be reused.
        """

    def cancel(self) -> None:
        """Stops as soon as possible; `done` still tells when the pages may be reused."""


class Peer(Protocol):
    """A connection to a receiver."""

    @property
    def route(self) -> Route:
        """Which way pages go: from process to process in this machine's memory, or that of its GPUs, or over a network
        device.
        """

    @property
    def alive(self) -> bool:
        """False once the connection is known to be broken or closed: connect again."""

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> Transfer:
        """Sends own page `pages[k][0]` to the ticket's page at index `pages[k][1]`, for every k.

        Raises:
            ValueError: A page is not in the pool, or an index not in the ticket or named twice.
        """

    async def close(self) -> None:
        """Ends the connection; transfers that are not done end with TransferError."""


class Transport(Protocol):
    """One pool's door to the others.

    Attributes:
        name: Of its kind: only transports of one kind understand each other.
        reason: Why this kind was chosen, empty if it was asked for.
        cost: What a transfer takes, if that was measured when it was chosen.
    """

    name: str
    reason: str
    cost: Cost | None
    address: bytes
    epoch: int

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> Landing:
        """Sets `pages` of the own pool aside for one sender.

        Raises:
            ValueError: A page is not in the pool or named twice, or the reservation or one of its pages is still
                open to writes of an earlier landing.
            TransferError: The transport is closed.
        """

    async def connect(self, address: bytes) -> Peer:
        """Connects to the transport that has this address (its own `address` attribute).

        Raises:
            TransferError: Nobody answers there, or its page size differs.
            StaleTransferError: Another transport answers there than the one that gave this address.
        """

    async def close(self) -> None:
        """Ends all landings, transfers and connections; afterwards the pool is not touched any more.

        It takes as long as `Landing.peer_gone` does.
        """

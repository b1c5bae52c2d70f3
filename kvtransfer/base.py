"""The transport protocol: copies pages of a sender's pool into pages that a receiver has reserved.

Its caller at the sender, `worker/page_sender.py`, counts what moves.

    receiver (decode worker)                      sender (prefill worker)
    address = transport.address
    landing = transport.expect(r, g, pages)
                      ── address and ticket, by some other wire ──▶
                                                  peer = await transport.connect(address)
                                                  transfer = peer.push(ticket, [(page, index), …])   any number of times
    await landing.done()                          await transfer.done()

A *landing* is the receiver's set of reserved pages. Who may touch which pages, and when:
- Receiver: from `expect` on, pages may be written at any time until `landing.done()` has returned, or until
  `landing.revoke()` has returned True. If `revoke()` returns False, a write may still be under way: quarantine the
  pages until the sender has said that nothing is in flight, or `landing.peer_gone()` has returned.
- Sender: pages are read from `push` on until `transfer.done()` has returned or raised. They must not change meanwhile.
- The epoch (a new one for each pool) and the generation (a new one for each reservation) guard messages: a push with an
  outdated ticket fails at the sender with StaleTransferError, and nothing is written.

Usually whole pages move. If the pools differ (tensor parallel degree, format), landing and ticket name *segments*: the
bytes of a page that move, and their place in the other pool's page. Several senders, such as the ranks of a tensor
parallel worker, can fill the same pages: each has a landing of its own, with its own segments.

Call all coroutine methods and `push` on one event loop; no method blocks it. The memory is the caller's and must
outlive the transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Route = Literal["memory", "network"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time of a transfer: `fixed_ms`, plus one millisecond for every `bytes_per_ms`."""

    fixed_ms: float
    bytes_per_ms: float


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A page pool: `num_pages` contiguous pages of `page_bytes`, starting at `pointer`.

    Attributes:
        device: CUDA device that holds the memory, as this process numbers devices. None for host memory.
    """

    pointer: int
    num_pages: int
    page_bytes: int
    device: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_bytes` contiguous bytes of a page, which move from offset `source` in the sender's page to offset `target`
    in the receiver's.
    """

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a sender needs to know about a landing.

    Attributes:
        epoch: Epoch of the receiver's pool.
        reservation: Name of the landing.
        generation: Distinguishes this use of the reservation from earlier ones.
        pages: The receiver's page for each index.
        segments: Parts of each page that move, the same as the landing's. Empty for whole pages.
    """

    epoch: int
    reservation: int
    generation: int
    pages: tuple[int, ...]
    segments: tuple[Segment, ...] = ()


class Landing(Protocol):
    """The receiver's side of one reservation. The first connection that pushes to it is its only sender."""

    async def done(self) -> None:
        """Returns when every page of the ticket has arrived.

        Raises:
            TransferError: The sender's connection broke or stalled, or the landing was revoked.
        """

    def revoke(self) -> bool:
        """Refuses all pages that have not begun to arrive. Idempotent; a complete landing stays complete.

        Returns True if nothing can be written any more.
        """

    async def peer_gone(self) -> None:
        """Returns when no write into these pages is under way and none can begin.

        Call it for a landing that was revoked, failed or completed. A sender without progress is cut off after a few
        seconds, so this returns even if the sender is stopped. The exception is a sender that writes directly into this
        process's memory (nixl, on one machine): then it returns when the sender continues or has ended.
        """


class Transfer(Protocol):
    """The sender's side of one push."""

    async def done(self) -> None:
        """Returns when the pages have arrived at the receiver. Afterwards the sender's pages may be reused.

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
        """How pages travel: `memory` within one machine (host memory or GPU to GPU), or `network`."""

    @property
    def alive(self) -> bool:
        """False once the connection is known to be broken or closed; connect again."""

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> Transfer:
        """Sends own page `pages[k][0]`, or the ticket's segments of it, to the ticket's page at index `pages[k][1]`.

        Raises:
            ValueError: A page is not in the pool, an index is not in the ticket or named twice, or a segment is not
                inside the page.
        """

    async def close(self) -> None:
        """Closes the connection; unfinished transfers fail with TransferError."""


class Transport(Protocol):
    """Connects one pool with the pools of other processes.

    Attributes:
        name: Kind of transport.
        reason: Why this kind was chosen; empty if it was asked for.
        address: Given to `connect` by transports of the same kind.
        common_address: Given to `connect` by transports of another kind. Empty if they can't connect.
        epoch: Epoch of the pool.
    """

    name: str
    reason: str
    address: bytes
    common_address: bytes
    epoch: int

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Landing:
        """Reserves `pages` of the own pool, or segments of each of them, for one sender.

        Raises:
            ValueError: A page is not in the pool or named twice, a segment is not inside the page, segments overlap,
                the reservation is still open, or an earlier landing may still write to the same bytes.
            TransferError: The transport is closed.
        """

    async def connect(self, address: bytes, page_bytes: int | None = None) -> Peer:
        """Connects to the transport with this address.

        Args:
            address: The other transport's `address`, or its `common_address` if it is of another kind.
            page_bytes: Its page size. None if it is the same as this pool's.

        Raises:
            TransferError: Nobody answers there, or its page size is another one.
            StaleTransferError: A different transport has this address now.
        """

    async def close(self) -> None:
        """Ends all landings, transfers and connections. Afterwards the pool is not touched any more.

        Takes as long as `Landing.peer_gone` does.
        """

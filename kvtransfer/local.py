"""Pools of one process, for tests and simulated workers: the rules of the real transports, a memcpy for a wire.

Pages are under way for as long as the network says. A sender's pages go out one batch after the other, whatever
transfers they belong to, as over one link; those of one connection in the order of the pushes.
"""

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Sequence

from cpd.common.errors import TransferError
from kvtransfer.base import Cost, PoolMemory, Route, Ticket
from kvtransfer.landings import BookedLanding, LandingBook
from kvtransfer.pushes import PushedTransfer, Run, check_push, merge

BATCH_PAGES = 16
"""Pages that begin to move together; between two batches a transfer can be cancelled."""


class LocalNetwork:
    """Where transports of one event loop find each other.

    Args:
        name: Of the transports.
        pages_ms: How long so many pages of one transfer take; by default no time at all.
    """

    def __init__(self, name: str = "local", pages_ms: Callable[[int], float] = lambda pages: 0.0) -> None:
        self.name = name
        self.pages_ms = pages_ms
        self._transports: dict[bytes, LocalTransport] = {}
        self._numbers = itertools.count()

    def create(self, memory: PoolMemory, *, epoch: int) -> "LocalTransport":
        """A transport that others of this network can connect to."""
        transport = LocalTransport(self, b"local-%d" % next(self._numbers), memory, epoch)
        self._transports[transport.address] = transport
        return transport

    def find(self, address: bytes) -> "LocalTransport":
        """Raises TransferError if nobody has that address."""
        if address not in self._transports:
            raise TransferError(f"no connection to {address!r}: nobody answers there")
        return self._transports[address]

    def remove(self, address: bytes) -> None:
        self._transports.pop(address, None)


class LocalTransport:
    """Implements `kvtransfer.base.Transport`. Made by `LocalNetwork.create`."""

    reason = ""
    cost: Cost | None = None

    def __init__(self, network: LocalNetwork, address: bytes, memory: PoolMemory, epoch: int) -> None:
        self.name = network.name
        self.address = address
        self.epoch = epoch
        self.memory = memory
        self.pages_ms = network.pages_ms
        self.link_free_s = 0.0  # loop time at which all that has begun to be sent will have arrived
        self.book = LandingBook(asyncio.get_running_loop(), memory.num_pages, epoch)
        self.connections: set[LocalPeer] = set()  # outgoing and incoming
        self._network = network
        self._closed = False

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> BookedLanding:
        return self.book.expect(reservation, generation, pages)

    async def connect(self, address: bytes) -> "LocalPeer":
        if self._closed:
            raise TransferError("the transport was closed")
        receiver = self._network.find(address)
        if receiver.memory.page_bytes != self.memory.page_bytes:
            sizes = (
                f"the sender's pages have {self.memory.page_bytes} bytes, the receiver's {receiver.memory.page_bytes}"
            )
            raise TransferError(f"{sizes}: both must serve the same model and dtype")
        return LocalPeer(self, receiver)

    async def close(self) -> None:
        self._closed = True
        self._network.remove(self.address)
        self.book.close("the transport was closed")
        for connection in list(self.connections):
            connection.fail("the transport was closed")


class LocalPeer:
    """Implements `kvtransfer.base.Peer`. Made by `LocalTransport.connect`."""

    route: Route = "memory"

    def __init__(self, sender: LocalTransport, receiver: LocalTransport) -> None:
        self.alive = True
        self._sender = sender
        self._receiver = receiver
        self._tasks: dict[asyncio.Task[None], PushedTransfer] = {}
        self._last: asyncio.Task[None] | None = None
        sender.connections.add(self)
        receiver.connections.add(self)

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        check_push(ticket, pages, self._sender.memory.num_pages)
        loop = asyncio.get_running_loop()
        transfer = PushedTransfer(loop, ticket, merge(ticket, pages, most=BATCH_PAGES), self._cancel)
        if self.alive:
            self._last = task = loop.create_task(self._carry(transfer, after=self._last))
            self._tasks[task] = transfer
            task.add_done_callback(self._tasks.pop)
        else:
            transfer.lost(TransferError("the connection was closed"))
        return transfer

    async def close(self) -> None:
        self.fail("the connection was closed")

    def fail(self, reason: str) -> None:
        """Ends the connection. Idempotent."""
        self.alive = False
        self._sender.connections.discard(self)
        self._receiver.connections.discard(self)
        for task, transfer in list(self._tasks.items()):
            task.cancel()
            transfer.lost(TransferError(reason))
        self._receiver.book.lost(self, reason)

    def _cancel(self, transfer: PushedTransfer) -> None:
        transfer.stop(TransferError("the transfer was cancelled"))

    async def _carry(self, transfer: PushedTransfer, after: asyncio.Task[None] | None) -> None:
        ticket, book, sender = transfer.ticket, self._receiver.book, self._sender
        clock = asyncio.get_running_loop().time
        arrival_s, pages, taken_ms = clock(), 0, 0.0
        if after is not None and not after.done():
            await asyncio.wait([after])
        while transfer.waiting:
            runs = transfer.take_batch(max_runs=BATCH_PAGES, max_pages=BATCH_PAGES)
            count = sum(run.count for run in runs)
            try:
                indices = [(run.index, run.count) for run in runs]
                landing = book.begin(self, ticket.epoch, ticket.reservation, ticket.generation, indices)
            except TransferError as error:
                transfer.refused(error)
                return
            pages, before_ms = pages + count, taken_ms
            taken_ms = sender.pages_ms(pages)
            # From when the last batch was due, not from when this task was woken: delays must not add up.
            arrival_s = max(arrival_s, sender.link_free_s) + (taken_ms - before_ms) / 1e3
            sender.link_free_s = arrival_s
            await asyncio.sleep(max(0.0, arrival_s - clock()))  # even without a delay others act meanwhile
            for run in runs:
                self._copy(run, landing)
            book.finish(landing, count)
            transfer.arrived()

    def _copy(self, run: Run, landing: BookedLanding) -> None:
        size = self._sender.memory.page_bytes
        source = self._sender.memory.pointer + run.page * size
        target = self._receiver.memory.pointer + landing.pages[run.index] * size
        ctypes.memmove(target, source, size * run.count)

"""Pools of one process, for tests: the rules of the real transports, a memcpy for a wire."""

import asyncio
import ctypes
import itertools
from collections.abc import Sequence

from cpd.errors import TransferError
from kvtransfer.base import PoolMemory, Ticket
from kvtransfer.landings import BookedLanding, LandingBook
from kvtransfer.pushes import PushedTransfer, Run, check_push, merge


class LocalNetwork:
    """Where transports of one event loop find each other."""

    def __init__(self) -> None:
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

    name = "local"

    def __init__(self, network: LocalNetwork, address: bytes, memory: PoolMemory, epoch: int) -> None:
        self.address = address
        self.epoch = epoch
        self.memory = memory
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

    def __init__(self, sender: LocalTransport, receiver: LocalTransport) -> None:
        self.alive = True
        self._sender = sender
        self._receiver = receiver
        self._tasks: dict[asyncio.Task[None], PushedTransfer] = {}
        sender.connections.add(self)
        receiver.connections.add(self)

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> PushedTransfer:
        check_push(ticket, pages, self._sender.memory.num_pages)
        loop = asyncio.get_running_loop()
        transfer = PushedTransfer(loop, ticket, merge(ticket, pages, most=1), self._cancel)
        if self.alive:
            task = loop.create_task(self._carry(transfer))
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

    async def _carry(self, transfer: PushedTransfer) -> None:
        ticket, book = transfer.ticket, self._receiver.book
        while transfer.waiting:
            runs = transfer.take_batch(max_runs=8, max_pages=8)
            try:
                indices = [(run.index, run.count) for run in runs]
                landing = book.begin(self, ticket.epoch, ticket.reservation, ticket.generation, indices)
            except TransferError as error:
                transfer.refused(error)
                return
            for run in runs:
                await asyncio.sleep(0)  # as on a wire, others act while pages are under way
                self._copy(run, landing)
            book.finish(landing, len(runs))
            transfer.arrived()

    def _copy(self, run: Run, landing: BookedLanding) -> None:
        size = self._sender.memory.page_bytes
        source = self._sender.memory.pointer + run.page * size
        target = self._receiver.memory.pointer + landing.pages[run.index] * size
        ctypes.memmove(target, source, size * run.count)

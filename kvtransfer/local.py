"""Transports between pools of one process, for tests and simulated workers. They obey the rules of the real ones.

Pages take as long as the network says. A sender's pages leave one batch after the other over one link, whatever
transfers they belong to; those of one connection leave in the order of the pushes.
"""

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Sequence

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory, Route, Segment, Ticket
from kvtransfer.landings import LandingEntry, LandingTable
from kvtransfer.pushes import PushedTransfer, prepare_push
from kvtransfer.segments import resolve_runs
from kvtransfer.session.receiving import page_size_problem

BATCH_PAGES = 16
"""Pages that begin to move together. Between two batches a transfer can be cancelled."""


class LocalNetwork:
    """Lets transports of one event loop find each other.

    Args:
        name: Name of the transports.
        pages_ms: Time in ms that a transfer of this many pages takes; by default none.
    """

    def __init__(self, name: str = "local", pages_ms: Callable[[int], float] = lambda pages: 0.0) -> None:
        self.name = name
        self.pages_ms = pages_ms
        self.transports: dict[bytes, LocalTransport] = {}  # by address
        self._numbers = itertools.count()

    def create(self, memory: PoolMemory, *, epoch: int) -> "LocalTransport":
        """A transport that others of this network can connect to."""
        transport = LocalTransport(self, b"local-%d" % next(self._numbers), memory, epoch)
        self.transports[transport.address] = transport
        return transport


class LocalTransport:
    """Implements `kvtransfer.base.Transport`. Created by `LocalNetwork.create`."""

    reason = ""
    common_address = b""

    def __init__(self, network: LocalNetwork, address: bytes, memory: PoolMemory, epoch: int) -> None:
        self.name = network.name
        self.address = address
        self.epoch = epoch
        self.memory = memory
        self.pages_ms = network.pages_ms
        self.link_free_s = 0.0  # loop time at which everything sent so far will have arrived
        self.landings = LandingTable(asyncio.get_running_loop(), memory, epoch)
        self.connections: set[LocalPeer] = set()  # outgoing and incoming
        self._network = network
        self._closed = False

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> LandingEntry:
        return self.landings.expect(reservation, generation, pages, segments)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> "LocalPeer":
        if self._closed:
            raise TransferError("the transport was closed")
        receiver, expected = self._network.transports.get(address), page_bytes or self.memory.page_bytes
        if receiver is None:
            raise TransferError(f"no connection to {address!r}: nobody answers there")
        if receiver.memory.page_bytes != expected:
            raise TransferError(page_size_problem(expected, receiver.memory.page_bytes))
        return LocalPeer(self, receiver)

    async def close(self) -> None:
        self._closed = True
        self._network.transports.pop(self.address, None)
        self.landings.close("the transport was closed")
        for connection in list(self.connections):
            connection.fail("the transport was closed")


class LocalPeer:
    """Implements `kvtransfer.base.Peer`. Created by `LocalTransport.connect`."""

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
        own, their_page_bytes = self._sender.memory, self._receiver.memory.page_bytes
        transfer = prepare_push(ticket, pages, own, their_page_bytes, BATCH_PAGES)
        if self.alive:
            self._last = task = asyncio.create_task(self._send(transfer, after=self._last))
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
        self._receiver.landings.fail(self, reason, gone=True)

    async def _send(self, transfer: PushedTransfer, after: asyncio.Task[None] | None) -> None:
        ticket, landings, sender = transfer.ticket, self._receiver.landings, self._sender
        clock = asyncio.get_running_loop().time
        arrival_s, pages, taken_ms = clock(), 0, 0.0
        if after is not None and not after.done():
            await asyncio.wait([after])
        while transfer.waiting:
            runs = transfer.take_batch(max_runs=BATCH_PAGES, max_pages=BATCH_PAGES)
            count = sum(run.count for run in runs)
            try:
                indices = [(run.index, run.count) for run in runs]
                landing = landings.begin(
                    self, ticket.epoch, ticket.reservation, ticket.generation, indices, transfer.layout
                )
            except TransferError as error:
                transfer.refused(error)
                return
            pages, before_ms = pages + count, taken_ms
            taken_ms = sender.pages_ms(pages)
            # From when the last batch was due, not from when this task was woken: delays must not add up.
            arrival_s = max(arrival_s, sender.link_free_s) + (taken_ms - before_ms) / 1e3
            sender.link_free_s = arrival_s
            await asyncio.sleep(max(0.0, arrival_s - clock()))  # even without a delay others act meanwhile
            places = [landing.pages[run.index] for run in runs]
            addresses = resolve_runs(sender.memory, self._receiver.memory, runs, places, ticket.segments)
            for source, target, num_bytes in zip(*(each.tolist() for each in addresses), strict=True):
                ctypes.memmove(target, source, num_bytes)
            landings.finish(landing, count)
            transfer.arrived()

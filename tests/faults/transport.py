"""A transport to which faults happen, around a real one. It keeps the protocol's promises (`kvtransfer.base`)."""

import asyncio
import ctypes
from collections.abc import Sequence

from cpd.common.errors import TransferError
from kvtransfer.base import Landing, Peer, PoolMemory, Route, Ticket, Transfer, Transport
from kvtransfer.local import LocalNetwork
from tests.faults.points import Action, Point, Points


class FaultyTransport:
    """See `kvtransfer.base.Transport`.

    Args:
        memory: Of its pool.
        points: Where faults happen.
    """

    def __init__(self, transport: Transport, memory: PoolMemory, points: Points) -> None:
        self.name = transport.name
        self.reason = transport.reason
        self.cost = transport.cost
        self.address = transport.address
        self.epoch = transport.epoch
        self._transport = transport
        self._memory = memory
        self._points = points

    def expect(self, reservation: int, generation: int, pages: Sequence[int]) -> Landing:
        landing = self._transport.expect(reservation, generation, pages)
        return _FaultyLanding(landing, self._memory, pages, self._points)

    async def connect(self, address: bytes) -> Peer:
        await self._points.passed(Point.CONNECT)
        return _FaultyPeer(await self._transport.connect(address), self._points)

    async def close(self) -> None:
        await self._transport.close()


class FaultyNetwork(LocalNetwork):
    """All its transports share their points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = Points()

    def create(self, memory: PoolMemory, *, epoch: int) -> Transport:  # type: ignore[override]
        return FaultyTransport(super().create(memory, epoch=epoch), memory, self.points)


class _FaultyLanding:
    def __init__(self, landing: Landing, memory: PoolMemory, pages: Sequence[int], points: Points) -> None:
        self._landing = landing
        self._memory = memory
        self._pages = pages
        self._points = points

    async def done(self) -> None:
        await self._landing.done()
        if await self._points.passed(Point.LANDED) is Action.CORRUPT and self._pages:
            start = self._memory.pointer + self._pages[len(self._pages) // 2] * self._memory.page_bytes
            ctypes.c_uint8.from_address(start + self._memory.page_bytes // 2).value ^= 0x10

    def revoke(self) -> bool:
        return self._landing.revoke()

    async def peer_gone(self) -> None:
        await self._landing.peer_gone()


class _FaultyPeer:
    def __init__(self, peer: Peer, points: Points) -> None:
        self._peer = peer
        self._points = points

    @property
    def route(self) -> Route:
        return self._peer.route

    @property
    def alive(self) -> bool:
        """Not while something is to happen when a connection is made: so one is made."""
        return self._peer.alive and not self._points.ordered(Point.CONNECT)

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> Transfer:
        return _FaultyTransfer(self._peer, ticket, pages, self._points)

    async def close(self) -> None:
        await self._peer.close()


class _FaultyTransfer:
    def __init__(self, peer: Peer, ticket: Ticket, pages: Sequence[tuple[int, int]], points: Points) -> None:
        self._peer = peer
        self._ticket = ticket
        self._points = points
        self._transfer: Transfer | None = None
        self._cancelled = asyncio.Event()
        self._task = asyncio.create_task(self._run(list(pages)), name="faulty-push")

    async def done(self) -> None:
        await asyncio.shield(self._task)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._transfer is not None:
            self._transfer.cancel()

    async def _run(self, pages: list[tuple[int, int]]) -> None:
        ready: list[tuple[int, int]] = []
        for page in pages:
            if self._points.ordered(Point.PAGE):
                await self._push(ready)  # what came before is there when something happens
                ready = []
                if await self._unless_cancelled(Point.PAGE) is Action.DROP:
                    continue
            ready.append(page)
        await self._push(ready)
        await self._unless_cancelled(Point.SENT)

    async def _push(self, pages: list[tuple[int, int]]) -> None:
        if self._cancelled.is_set():
            raise TransferError("the transfer was cancelled")
        if pages:
            self._transfer = self._peer.push(self._ticket, pages)
            await self._transfer.done()

    async def _unless_cancelled(self, point: Point) -> Action | None:
        passed = asyncio.create_task(self._points.passed(point))
        cancelled = asyncio.create_task(self._cancelled.wait())
        await asyncio.wait([passed, cancelled], return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if not passed.done():
            passed.cancel()
            raise TransferError("the transfer was cancelled")
        return passed.result()

"""A transport with injection points, around a real one. It keeps to the contract of `kvtransfer.base`."""

import asyncio
import ctypes
from collections.abc import Sequence

from cpd.common.errors import TransferError
from kvtransfer.base import Landing, Peer, PoolMemory, Route, Segment, Ticket, Transfer, Transport
from kvtransfer.local import LocalNetwork
from tests.faults.points import Action, InjectionPoints, Point


class FaultyTransport:
    """A `kvtransfer.base.Transport` with injection points.

    Args:
        memory: The pool's memory.
    """

    def __init__(self, transport: Transport, memory: PoolMemory, points: InjectionPoints) -> None:
        self.name = transport.name
        self.reason = transport.reason
        self.address = transport.address
        self.common_address = transport.common_address
        self.epoch = transport.epoch
        self._transport = transport
        self._memory = memory
        self._points = points

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Landing:
        landing = self._transport.expect(reservation, generation, pages, segments)
        return _FaultyLanding(landing, self._memory, pages, self._points)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> Peer:
        await self._points.reach(Point.CONNECT)
        return _FaultyPeer(await self._transport.connect(address, page_bytes), self._points)

    async def close(self) -> None:
        await self._transport.close()


class FaultyNetwork(LocalNetwork):
    """A network in one process, whose transports share one set of injection points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = InjectionPoints()

    def create(self, memory: PoolMemory, *, epoch: int) -> Transport:  # type: ignore[override]
        return FaultyTransport(super().create(memory, epoch=epoch), memory, self.points)


class _FaultyLanding:
    def __init__(self, landing: Landing, memory: PoolMemory, pages: Sequence[int], points: InjectionPoints) -> None:
        self._landing = landing
        self._memory = memory
        self._pages = pages
        self._points = points

    async def done(self) -> None:
        await self._landing.done()
        if await self._points.reach(Point.LANDED) is Action.CORRUPT and self._pages:
            start = self._memory.pointer + self._pages[len(self._pages) // 2] * self._memory.page_bytes
            ctypes.c_uint8.from_address(start + self._memory.page_bytes // 2).value ^= 0x10

    def revoke(self) -> bool:
        return self._landing.revoke()

    async def peer_gone(self) -> None:
        await self._landing.peer_gone()


class _FaultyPeer:
    def __init__(self, peer: Peer, points: InjectionPoints) -> None:
        self._peer = peer
        self._points = points

    @property
    def route(self) -> Route:
        return self._peer.route

    @property
    def alive(self) -> bool:
        """False also while CONNECT is armed, so that the sender connects again and reaches the point."""
        return self._peer.alive and not self._points.is_armed(Point.CONNECT)

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> Transfer:
        return _FaultyTransfer(self._peer, ticket, pages, self._points)

    async def close(self) -> None:
        await self._peer.close()


class _FaultyTransfer:
    def __init__(self, peer: Peer, ticket: Ticket, pages: Sequence[tuple[int, int]], points: InjectionPoints) -> None:
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
            if self._points.is_armed(Point.PAGE):
                await self._push(ready)  # pages before this one have arrived when the action triggers
                ready = []
                if await self._reach(Point.PAGE) is Action.DROP:
                    continue
            ready.append(page)
        await self._push(ready)
        await self._reach(Point.SENT)

    async def _push(self, pages: list[tuple[int, int]]) -> None:
        if self._cancelled.is_set():
            raise TransferError("the transfer was cancelled")
        if pages:
            self._transfer = self._peer.push(self._ticket, pages)
            await self._transfer.done()

    async def _reach(self, point: Point) -> Action | None:
        """Reaches the point; raises TransferError when the transfer is cancelled while held there."""
        reached = asyncio.create_task(self._points.reach(point))
        cancelled = asyncio.create_task(self._cancelled.wait())
        await asyncio.wait([reached, cancelled], return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if not reached.done():
            reached.cancel()
            raise TransferError("the transfer was cancelled")
        return reached.result()

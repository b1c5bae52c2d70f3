"""Pages on their way: how long they are pinned."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer, PoolMemory, Ticket
from worker.delivery import Delivery, Outlet, Traffic
from worker.engine_bridge import EngineBridge


class HeldTransfer:
    """Arrives when `arrived` is set."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def done(self) -> None:
        await self.arrived.wait()

    def cancel(self) -> None: ...


class HeldPeer:
    """Its pushes are held."""

    def __init__(self) -> None:
        self.transfer = HeldTransfer()

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> HeldTransfer:
        return self.transfer


class Pins:
    """The part of an engine, and of its bridge, that unpins."""

    def __init__(self) -> None:
        self.unpinned: list[int] = []

    def post(self, fn: Callable[[Any], object]) -> None:
        fn(self)

    def unpin(self, pages: Sequence[int]) -> None:
        self.unpinned += pages


async def test_pages_stay_pinned_while_they_are_sent_also_when_nobody_can_be_told_of_them() -> None:
    def tell(pages: pb.FillPages) -> None:
        raise RuntimeError("a bug")

    pins, peer = Pins(), HeldPeer()
    delivery = Delivery(
        cast(Peer, peer),
        pb.FillLanding(reservation=1, generation=1, epoch=1, pages=[7, 8]),
        2,
        outlet=Outlet(cast(EngineBridge, pins), PoolMemory(0, 0, 0), Traffic()),
        checksums=False,
        tell=tell,
        failed=lambda reason: None,
    )
    delivery.push(0, [3, 4])
    done = asyncio.ensure_future(delivery.done())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not done.done()
    assert not pins.unpinned
    peer.transfer.arrived.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await done
    assert pins.unpinned == [3, 4]

"""Pages on their way: how many at a time, and how long they are pinned."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer, PoolMemory, Ticket
from worker.delivery import RUN_PAGES, Delivery, Outlet, Traffic
from worker.engine_bridge import EngineBridge


class HeldTransfer:
    """Arrives when `arrived` is set."""

    def __init__(self, pages: Sequence[tuple[int, int]]) -> None:
        self.pages = list(pages)
        self.arrived = asyncio.Event()

    async def done(self) -> None:
        await self.arrived.wait()

    def cancel(self) -> None: ...


class HeldPeer:
    """Its pushes are held."""

    def __init__(self) -> None:
        self.transfers: list[HeldTransfer] = []

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> HeldTransfer:
        self.transfers.append(HeldTransfer(pages))
        return self.transfers[-1]


class Pins:
    """The part of an engine, and of its bridge, that unpins."""

    def __init__(self) -> None:
        self.unpinned: list[int] = []

    def post(self, fn: Callable[[Any], object]) -> None:
        fn(self)

    def unpin(self, pages: Sequence[int]) -> None:
        self.unpinned += pages


class Sending:
    """A delivery of a prompt of so many blocks, the first ones of which are there already."""

    def __init__(self, blocks: int, there: int = 0, tell: Callable[[pb.FillPages], None] = lambda pages: None) -> None:
        self.pins, self.peer, self.traffic = Pins(), HeldPeer(), Traffic()
        self.delivery = Delivery(
            cast(Peer, self.peer),
            pb.FillLanding(reservation=1, generation=1, epoch=1, first_block=there, pages=range(blocks - there)),
            blocks,
            outlet=Outlet(cast(EngineBridge, self.pins), PoolMemory(0, 0, 0), self.traffic),
            checksums=False,
            tell=tell,
            failed=lambda reason: None,
        )


async def others_turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_many_pages_at_once_leave_in_runs_so_that_it_shows_that_they_move() -> None:
    sending = Sending(3 * RUN_PAGES, there=5)
    pages = list(range(1000, 1000 + 3 * RUN_PAGES))
    sending.delivery.push(0, pages)
    runs = [transfer.pages for transfer in sending.peer.transfers]
    assert [page for run in runs for page in run] == [(page, index) for index, page in enumerate(pages[5:])]
    assert max(map(len, runs)) == RUN_PAGES
    sending.peer.transfers[0].arrived.set()
    await others_turn()
    assert sending.traffic.completed == 1
    assert sending.pins.unpinned == pages[: 5 + RUN_PAGES]
    for transfer in sending.peer.transfers:
        transfer.arrived.set()
    await sending.delivery.done()
    assert sending.pins.unpinned == pages
    assert sending.delivery.pages_sent == len(pages) - 5


async def test_pages_stay_pinned_while_they_are_sent_also_when_nobody_can_be_told_of_them() -> None:
    def tell(pages: pb.FillPages) -> None:
        raise RuntimeError("a bug")

    sending = Sending(2, tell=tell)
    sending.delivery.push(0, [3, 4])
    done = asyncio.ensure_future(sending.delivery.done())
    await others_turn()
    assert not done.done()
    assert not sending.pins.unpinned
    sending.peer.transfers[0].arrived.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await done
    assert sending.pins.unpinned == [3, 4]

"""Page transfers: how many pages at a time, and how long they are pinned."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer, PoolMemory, Ticket
from worker.async_engine import AsyncEngine
from worker.page_sender import RUN_PAGES, PageSender, SourcePool

PAGE_BYTES = 4096


class HeldTransfer:
    """A transfer that completes when `arrived` is set."""

    def __init__(self, pages: Sequence[tuple[int, int]]) -> None:
        self.pages = list(pages)
        self.arrived = asyncio.Event()

    async def done(self) -> None:
        await self.arrived.wait()

    def cancel(self) -> None: ...


class HeldPeer:
    """A peer that keeps its transfers open."""

    def __init__(self) -> None:
        self.transfers: list[HeldTransfer] = []

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> HeldTransfer:
        self.transfers.append(HeldTransfer(pages))
        return self.transfers[-1]


class Pins:
    """Stands in for an AsyncEngine that unpins pages."""

    def __init__(self) -> None:
        self.unpinned: list[int] = []

    def post(self, fn: Callable[[Any], object]) -> None:
        fn(self)

    def unpin(self, pages: Sequence[int]) -> None:
        self.unpinned += pages


class Sending:
    """Sends a prompt of `blocks` blocks. The receiver has the first `there` of them already."""

    def __init__(
        self, blocks: int, there: int = 0, announce: Callable[[pb.PrefillPages], None] = lambda pages: None
    ) -> None:
        self.pins, self.peer = Pins(), HeldPeer()
        self.source = SourcePool(cast(AsyncEngine, self.pins), PoolMemory(0, 0, PAGE_BYTES))
        self.sender = PageSender(
            cast(Peer, self.peer),
            pb.PrefillLanding(reservation=1, generation=1, epoch=1, first_block=there, pages=range(blocks - there)),
            blocks,
            source=self.source,
            checksums=False,
            announce=announce,
            failed=lambda reason: None,
        )


async def run_other_tasks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_many_pages_are_sent_in_runs_that_show_progress() -> None:
    sending = Sending(3 * RUN_PAGES, there=5)
    pages = list(range(1000, 1000 + 3 * RUN_PAGES))
    sending.sender.send(0, pages)
    runs = [transfer.pages for transfer in sending.peer.transfers]
    assert [page for run in runs for page in run] == [(page, index) for index, page in enumerate(pages[5:])]
    assert max(map(len, runs)) == RUN_PAGES
    sending.peer.transfers[0].arrived.set()
    await run_other_tasks()
    assert sending.source.completed_transfers == 1
    load = pb.Load()
    sending.source.add_load(load)
    assert sum(load.transfers.seconds.counts) == sum(load.transfers.bytes_per_second.counts) == 1
    assert load.transfers.bytes.sum == RUN_PAGES * PAGE_BYTES
    assert sending.pins.unpinned == pages[: 5 + RUN_PAGES]
    for transfer in sending.peer.transfers:
        transfer.arrived.set()
    await sending.sender.done()
    assert sending.pins.unpinned == pages
    assert sending.sender.pages_sent == len(pages) - 5


async def test_pages_stay_pinned_during_the_transfer_even_if_they_cannot_be_announced() -> None:
    def announce(pages: pb.PrefillPages) -> None:
        raise RuntimeError("a bug")

    sending = Sending(2, announce=announce)
    sending.sender.send(0, [3, 4])
    done = asyncio.ensure_future(sending.sender.done())
    await run_other_tasks()
    assert not done.done()
    assert not sending.pins.unpinned
    sending.peer.transfers[0].arrived.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await done
    assert sending.pins.unpinned == [3, 4]

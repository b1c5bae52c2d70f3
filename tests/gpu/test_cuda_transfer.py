"""Pages between the pools of two processes on GPUs, by the transport that workers use on GPUs."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import kvtransfer
from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory, Ticket
from kvtransfer.checksums import page_checksums
from kvtransfer.landings import LandingEntry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nixl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="needs NIXL"),
]

PAGES, PAGE_BYTES = 256, 9 << 18
DEADLINE_S = 60.0
EMPTY = 255


def pool(filled: bool, device: int) -> tuple[torch.Tensor, PoolMemory]:
    """Allocates pages of the engine's size with torch: [PAGES, PAGE_BYTES], all EMPTY or random."""
    pages = torch.full((PAGES, PAGE_BYTES), EMPTY, dtype=torch.uint8, device=f"cuda:{device}")
    if filled:
        pages.random_(0, EMPTY)
    torch.cuda.synchronize(device)
    return pages, PoolMemory(pages.data_ptr(), PAGES, PAGE_BYTES, device)


def sender(pipe: Connection) -> None:
    """Runs in another process: pushes the pages it is told to, and sends their checksums, until it is killed."""

    async def serve() -> None:
        _, memory = pool(True, torch.cuda.device_count() - 1)
        transport = await kvtransfer.create("auto", memory, epoch=2, host="127.0.0.1")
        peer = await transport.connect(pipe.recv())
        while True:
            ticket, pages = pipe.recv()
            pipe.send(page_checksums(memory, pages))
            await peer.push(ticket, [(page, index) for index, page in enumerate(pages)]).done()
            pipe.send("done")

    asyncio.run(serve())


class Sender:
    """Controls the other process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=sender, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def connect(self, address: bytes) -> None:
        self._pipe.send(address)

    async def push(self, ticket: Ticket, pages: Sequence[int]) -> bytes:
        """Starts a push. Returns the checksums of the sender's pages."""
        self._pipe.send((ticket, list(pages)))
        checksums: bytes = await self.answer()
        return checksums

    async def answer(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.to_thread(self._pipe.recv)

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


def test_scattered_pages_arrive_whole_and_nothing_else_changes() -> None:
    async def run() -> None:
        pages, memory = pool(False, 0)
        transport = await kvtransfer.create("auto", memory, epoch=1, host="127.0.0.1")
        other = Sender()
        other.connect(transport.address)
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
        places, own = order[: PAGES // 2], order[::-1][: PAGES // 2]
        landing = transport.expect(1, 1, places)
        sent = await other.push(Ticket(1, 1, 1, tuple(places)), own)
        async with asyncio.timeout(DEADLINE_S):
            await landing.done()
        assert await other.answer() == "done"
        assert page_checksums(memory, places) == sent
        assert bool((pages[order[PAGES // 2 :]] == EMPTY).all())
        await transport.close()
        other.kill()

    asyncio.run(run())


def test_a_killed_sender_writes_nothing_after_its_landing_settled() -> None:
    async def run() -> None:
        pages, memory = pool(False, 0)
        transport = await kvtransfer.create("auto", memory, epoch=1, host="127.0.0.1")
        other = Sender()
        other.connect(transport.address)
        everything = list(range(PAGES))
        landing = transport.expect(1, 1, everything)  # one page more than is pushed
        assert isinstance(landing, LandingEntry)
        await other.push(Ticket(1, 1, 1, tuple(everything)), everything[1:])
        async with asyncio.timeout(DEADLINE_S):
            while not landing.begun:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
            other.kill()
            assert not landing.revoke()
            with pytest.raises(TransferError):
                await landing.done()
            await landing.peer_gone()
        pages.fill_(EMPTY)
        torch.cuda.synchronize()
        await asyncio.sleep(0.5)  # a copy that outlived its process would have arrived by then
        assert bool((pages == EMPTY).all())
        await transport.close()

    asyncio.run(run())

"""The two processes of `page_transfer`: one sends every page of its pool to scattered pages of the other's.

A peer talks to its parent over a pipe, and to the other peer over the measured transport. These messages repeat until
it is killed:

    receiver -> parent -> sender   its address (once)
    parent -> both                 a page size
    sender -> parent               the seconds of each of `ROUNDS` pushes
    parent -> receiver             request to check the pages
    receiver -> parent             True if every page is right
"""

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from scripts.gpu.common import require

ROUNDS = 5
Peer = Callable[[Connection, str, int], None]
"""Called with the pipe, the device of its pool, and the pool's size in bytes."""


def contents(pages: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Content of the sender's pages with these numbers: [N] -> [N, page_bytes] uint8."""
    offsets = torch.arange(page_bytes, device=pages.device, dtype=torch.int32)
    return ((pages.to(torch.int32)[:, None] * 131 + offsets * 7) % 251).to(torch.uint8)


def targets(count: int) -> list[int]:
    """The receiver's page for each page of the sender: a permutation, the same in both processes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()


def arrived(pool: torch.Tensor, page_bytes: int) -> bool:
    """True if the receiver's pool has the right content."""
    pages = pool.view(-1, page_bytes)
    order = torch.tensor(targets(len(pages)), device=pool.device)
    return torch.equal(pages[order], contents(torch.arange(len(pages), device=pool.device), page_bytes))


def fill(pool: torch.Tensor, page_bytes: int) -> None:
    """Fills the sender's pool."""
    pages = pool.view(-1, page_bytes)
    pages.copy_(contents(torch.arange(len(pages), device=pool.device), page_bytes))
    _synchronize(pool)  # transports don't wait for streams


def _synchronize(pool: torch.Tensor) -> None:
    if pool.is_cuda:
        torch.cuda.synchronize()


def _pool(device: str, size: int) -> torch.Tensor:
    """A pool filled with 255. It has its own allocation, because other processes map whole allocations."""
    return torch.full((size,), 255, dtype=torch.uint8, device=device)


def _check(pipe: Connection, pool: torch.Tensor, page_bytes: int) -> None:
    """Checks the receiver's pages when the parent asks for it, and clears the pool."""
    pipe.recv()
    pipe.send(arrived(pool, page_bytes))
    pool.fill_(255)
    _synchronize(pool)


# NIXL: the sender writes into the receiver's memory; the receiver is passive.


def _nixl_agent(name: str, pool: torch.Tensor) -> Any:
    """Creates an agent after the pool, so that UCX finds a CUDA context when it looks for devices."""
    nixl = require("nixl_cu13", "nixl-cu13")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory(pool)
    return agent


def nixl_receiver(pipe: Connection, device: str, size: int) -> None:
    """See the module."""
    pool = _pool(device, size)
    agent = _nixl_agent("receiver", pool)
    pipe.send((agent.get_agent_metadata(), pool.data_ptr()))
    while True:
        page_bytes = pipe.recv()
        _check(pipe, pool, page_bytes)


def nixl_sender(pipe: Connection, device: str, size: int) -> None:
    """See the module."""
    pool = _pool(device, size)
    agent = _nixl_agent("sender", pool)
    metadata, address = pipe.recv()
    receiver = agent.add_remote_agent(metadata)
    if isinstance(receiver, bytes):
        receiver = receiver.decode()
    kind = "VRAM" if pool.is_cuda else "DRAM"
    while True:
        page_bytes = pipe.recv()
        fill(pool, page_bytes)
        offsets = range(0, size, page_bytes)
        count = len(offsets)
        pages = [[(start + offset, page_bytes, 0) for offset in offsets] for start in (pool.data_ptr(), address)]
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages[0], kind)
        there = agent.prep_xfer_dlist(receiver, pages[1], kind)
        seconds = []
        for _ in range(ROUNDS):
            handle = agent.make_prepped_xfer("WRITE", here, list(range(count)), there, targets(count))
            started = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds.append(time.perf_counter() - started)
            if state != "DONE":
                raise RuntimeError(f"NIXL ended a transfer with {state}")
            agent.release_xfer_handle(handle)
        pipe.send(seconds)


# ucxx: one tagged message per page, and one back when all have arrived. Error handling is on: without it, the death of
# one peer would end or hang the other.


def ucxx_receiver(pipe: Connection, device: str, size: int) -> None:
    """See the module."""
    ucxx = require("ucxx", "ucxx-cu13")
    pool = _pool(device, size)

    async def receive() -> None:
        loop = asyncio.get_running_loop()
        served: asyncio.Future[Any] = loop.create_future()

        async def accept(endpoint: Any) -> None:
            served.set_result(endpoint)

        listener = ucxx.create_listener(accept)
        pipe.send(listener.port)
        endpoint = await served
        while True:
            page_bytes = await loop.run_in_executor(None, pipe.recv)
            pages = _messages(pool, page_bytes)
            for _ in range(ROUNDS):
                order = enumerate(targets(len(pages)))
                await asyncio.gather(*(endpoint.recv(pages[page], **_tag(ucxx, tag)) for tag, page in order))
                await endpoint.send(np.zeros(1, np.uint8), **_tag(ucxx, len(pages)))
            await loop.run_in_executor(None, _check, pipe, pool, page_bytes)

    asyncio.run(receive())


def ucxx_sender(pipe: Connection, device: str, size: int) -> None:
    """See the module."""
    ucxx = require("ucxx", "ucxx-cu13")
    pool = _pool(device, size)

    async def send() -> None:
        loop = asyncio.get_running_loop()
        endpoint = await ucxx.create_endpoint("127.0.0.1", pipe.recv())
        while True:
            page_bytes = await loop.run_in_executor(None, pipe.recv)
            fill(pool, page_bytes)
            pages = _messages(pool, page_bytes)
            seconds = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                await asyncio.gather(*(endpoint.send(page, **_tag(ucxx, tag)) for tag, page in enumerate(pages)))
                await endpoint.recv(np.zeros(1, np.uint8), **_tag(ucxx, len(pages)))
                seconds.append(time.perf_counter() - started)
            pipe.send(seconds)

    asyncio.run(send())


def _messages(pool: torch.Tensor, page_bytes: int) -> list[Any]:
    """The pages in the form ucxx expects."""
    pages = pool.view(-1, page_bytes)
    return list(pages if pool.is_cuda else pages.numpy())


def _tag(ucxx: Any, number: int) -> dict[str, Any]:
    """Arguments for a tag that ucxx does not hash."""
    return {"tag": ucxx.types.Tag(number), "force_tag": True}

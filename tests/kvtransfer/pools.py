"""Page pools in plain memory, and transports over them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import kvtransfer
from kvtransfer.base import PoolMemory, Ticket, Transport
from kvtransfer.local import LocalNetwork
from kvtransfer.nixl.transport import NixlTransport

EMPTY = 0xEE


class Pool:
    """`num_pages` pages of `page_bytes`: all EMPTY, or random from `seed`; `device` as in `PoolMemory`."""

    def __init__(
        self, num_pages: int, page_bytes: int = 4096, seed: int | None = None, device: int | None = None
    ) -> None:
        self.pages: NDArray[np.uint8] = np.full((num_pages, page_bytes), EMPTY, np.uint8)
        if seed is not None:
            noise = np.frombuffer(np.random.default_rng(seed).bytes(self.pages.size), np.uint8)
            self.pages[:] = np.minimum(noise, EMPTY - 1).reshape(self.pages.shape)
        self.memory = PoolMemory(self.pages.ctypes.data, num_pages, page_bytes, device)

    def untouched(self, pages: Sequence[int] | None = None) -> bool:
        """True if these pages, or all, are still EMPTY."""
        chosen = self.pages if pages is None else self.pages[list(pages)]
        return bool((chosen == EMPTY).all())


class Network(Protocol):
    """Opens transports of one kind, and closes them after the test."""

    async def open(self, pool: Pool, epoch: int = 1) -> Transport: ...

    async def close(self) -> None: ...


class Local:
    def __init__(self, network: LocalNetwork | None = None) -> None:
        self._network = network or LocalNetwork()
        self._transports: list[Transport] = []

    async def open(self, pool: Pool, epoch: int = 1) -> Transport:
        self._transports.append(self._network.create(pool.memory, epoch=epoch))
        return self._transports[-1]

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()


class Simulated(Local):
    """Like the network between simulated workers: pages take some time."""

    def __init__(self) -> None:
        super().__init__(LocalNetwork("simulated", lambda pages: 1.0 + 0.02 * pages))


class Real:
    """Transports for several processes; here all of them are in one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._transports: list[Transport] = []

    async def open(self, pool: Pool, epoch: int = 1) -> Transport:
        self._transports.append(await kvtransfer.create(self._name, pool.memory, epoch=epoch, host="127.0.0.1"))
        return self._transports[-1]

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()


class Streamed(Real):
    """Transports that neither load NIXL nor write into another process's memory."""

    def __init__(self) -> None:
        super().__init__("stream")

    async def open(self, pool: Pool, epoch: int = 1) -> Transport:
        host = "127.0.0.1"
        transport = await NixlTransport.open(
            pool.memory,
            epoch=epoch,
            host=host,
            advertise_host=host,
            device_host=host,
            same_host=False,
            loads_nixl=False,
        )
        self._transports.append(transport)
        return transport


def ticket(transport: Transport, reservation: int, generation: int, pages: Sequence[int]) -> Ticket:
    """The ticket of a landing."""
    return Ticket(transport.epoch, reservation, generation, tuple(pages))

"""A pool's transport is closed while the pool has no memory."""

from typing import Any

import numpy as np
import pytest

from cpd.common.errors import StaleTransferError, TransferError
from cpd.common.settings import WorkerSettings
from kvtransfer.base import PoolMemory, Ticket, Transport
from kvtransfer.local import LocalNetwork
from worker.pool_transport import PoolTransport

PAGES = np.zeros((4, 64), np.uint8)
MEMORY = PoolMemory(PAGES.ctypes.data, 4, 64)


class Opener:
    """Opens transports of one network, and records the names that were asked for."""

    def __init__(self) -> None:
        self.network = LocalNetwork("chosen")
        self.names: list[str] = []

    async def __call__(self, name: str, memory: PoolMemory, *, epoch: int, **_: Any) -> Transport:
        self.names.append(name)
        transport = self.network.create(memory, epoch=epoch)
        transport.reason = "it works here"
        return transport


async def test_each_opening_gives_a_new_epoch_and_address_of_the_same_kind() -> None:
    opener = Opener()
    transport = PoolTransport(opener, MEMORY, WorkerSettings())
    seen = []
    for _ in range(3):
        await transport.open()
        seen.append((transport.epoch, transport.address))
        await transport.close()
    assert len(set(seen)) == 3
    assert opener.names == ["auto", "chosen", "chosen"]
    assert (transport.name, transport.reason) == ("chosen", "it works here")


async def test_while_it_is_closed_nothing_is_expected_or_connected() -> None:
    opener = Opener()
    transport, other = PoolTransport(opener, MEMORY, WorkerSettings()), PoolTransport(opener, MEMORY, WorkerSettings())
    await transport.open()
    await other.open()
    address = transport.address
    await transport.close()
    await transport.close()
    with pytest.raises(TransferError, match="closed"):
        transport.expect(1, 1, [0])
    with pytest.raises(TransferError, match="closed"):
        await transport.connect(other.address)
    with pytest.raises(TransferError):
        await other.connect(address)
    await other.close()


async def test_a_ticket_of_before_is_refused() -> None:
    opener = Opener()
    transport, other = PoolTransport(opener, MEMORY, WorkerSettings()), PoolTransport(opener, MEMORY, WorkerSettings())
    await transport.open()
    await other.open()
    ticket = Ticket(transport.epoch, 1, 1, (2,))
    await transport.close()
    await transport.open()
    landing = transport.expect(1, 1, [2])
    peer = await other.connect(transport.address)
    with pytest.raises(StaleTransferError):
        await peer.push(ticket, [(0, 0)]).done()
    assert landing.revoke()
    await peer.close()
    await other.close()
    await transport.close()

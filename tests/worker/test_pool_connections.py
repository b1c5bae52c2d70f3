import asyncio

import numpy as np
import pytest

import worker.pool_connections
from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.local import LocalNetwork, LocalPeer, LocalTransport
from worker.pool_connections import PoolConnections


def transport(network: LocalNetwork) -> LocalTransport:
    memory = np.zeros((4, 16), np.int64)
    return network.create(PoolMemory(memory.ctypes.data, 4, memory[0].nbytes), epoch=1)


async def test_users_share_a_connection_even_while_it_is_being_made() -> None:
    network = LocalNetwork()
    pools, there = PoolConnections(transport(network)), transport(network)

    async def use() -> object:
        async with pools.use(there.address) as connecting:
            return await connecting

    assert len(set(await asyncio.gather(*(use() for _ in range(5))))) == 1
    await pools.close()
    assert not there.connections


async def test_a_broken_connection_is_replaced_for_the_next_user() -> None:
    network = LocalNetwork()
    pools, there = PoolConnections(transport(network)), transport(network)
    async with pools.use(there.address) as first:
        old = await first
        await old.close()
        async with pools.use(there.address) as second:
            new = await second
            assert new is not old
            assert new.alive
    async with pools.use(there.address) as third:
        assert await third is new
    await pools.close()


async def test_a_failed_connection_is_tried_again_by_the_next_user() -> None:
    pools = PoolConnections(transport(LocalNetwork()))
    for _ in range(2):
        with pytest.raises(TransferError):
            async with pools.use(b"nobody") as connecting:
                await connecting
    assert not pools._entries


async def test_a_connection_attempt_outlives_its_user_and_serves_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, begun, goes_on = LocalNetwork(), asyncio.Event(), asyncio.Event()
    pools, there = PoolConnections(transport(network)), transport(network)
    real = LocalTransport.connect

    async def connect(self: LocalTransport, address: bytes) -> LocalPeer:
        assert not begun.is_set()
        begun.set()
        await goes_on.wait()
        return await real(self, address)

    monkeypatch.setattr(LocalTransport, "connect", connect)
    async with pools.use(there.address):
        await begun.wait()
    goes_on.set()
    async with pools.use(there.address) as connecting:
        assert (await connecting).alive
    await pools.close()
    assert not there.connections


async def test_close_cancels_connection_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def connect(self: LocalTransport, address: bytes) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(LocalTransport, "connect", connect)
    pools = PoolConnections(transport(LocalNetwork()))
    async with pools.use(b"silent"):
        await begun.wait()
    assert not given_up.is_set()
    await pools.close()
    assert given_up.is_set()


async def test_the_longest_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.pool_connections, "MAX_IDLE", 1)
    network = LocalNetwork()
    pools, first, second = PoolConnections(transport(network)), transport(network), transport(network)
    for there in (first, second):
        async with pools.use(there.address) as connecting:
            await connecting
    assert not first.connections
    assert second.connections
    await pools.close()

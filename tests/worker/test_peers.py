import asyncio

import numpy as np
import pytest

import worker.peers
from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.local import LocalNetwork, LocalPeer, LocalTransport
from worker.peers import Peers


def transport(network: LocalNetwork) -> LocalTransport:
    memory = np.zeros((4, 16), np.int64)
    return network.create(PoolMemory(memory.ctypes.data, 4, memory[0].nbytes), epoch=1)


async def test_fills_share_a_connection_also_while_it_is_made() -> None:
    network = LocalNetwork()
    peers, there = Peers(transport(network)), transport(network)

    async def use() -> object:
        async with peers.use(there.address) as connecting:
            return await connecting

    assert len(set(await asyncio.gather(*(use() for _ in range(5))))) == 1
    await peers.close()
    assert not there.connections


async def test_a_broken_connection_is_replaced_for_the_next_one() -> None:
    network = LocalNetwork()
    peers, there = Peers(transport(network)), transport(network)
    async with peers.use(there.address) as first:
        old = await first
        await old.close()
        async with peers.use(there.address) as second:
            new = await second
            assert new is not old
            assert new.alive
    async with peers.use(there.address) as third:
        assert await third is new
    await peers.close()


async def test_an_address_where_nobody_answers_is_tried_again_next_time() -> None:
    peers = Peers(transport(LocalNetwork()))
    for _ in range(2):
        with pytest.raises(TransferError):
            async with peers.use(b"nobody") as connecting:
                await connecting
    assert not peers._entries


async def test_a_connection_that_takes_longer_than_anybody_waits_is_there_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, begun, goes_on = LocalNetwork(), asyncio.Event(), asyncio.Event()
    peers, there = Peers(transport(network)), transport(network)
    real = LocalTransport.connect

    async def connect(self: LocalTransport, address: bytes) -> LocalPeer:
        assert not begun.is_set()
        begun.set()
        await goes_on.wait()
        return await real(self, address)

    monkeypatch.setattr(LocalTransport, "connect", connect)
    async with peers.use(there.address):
        await begun.wait()
    goes_on.set()
    async with peers.use(there.address) as connecting:
        assert (await connecting).alive
    await peers.close()
    assert not there.connections


async def test_closing_gives_up_what_is_still_being_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def connect(self: LocalTransport, address: bytes) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(LocalTransport, "connect", connect)
    peers = Peers(transport(LocalNetwork()))
    async with peers.use(b"silent"):
        await begun.wait()
    assert not given_up.is_set()
    await peers.close()
    assert given_up.is_set()


async def test_the_longest_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.peers, "MAX_IDLE", 1)
    network = LocalNetwork()
    peers, first, second = Peers(transport(network)), transport(network), transport(network)
    for there in (first, second):
        async with peers.use(there.address) as connecting:
            await connecting
    assert not first.connections
    assert second.connections
    await peers.close()

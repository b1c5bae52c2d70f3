import asyncio

import numpy as np
import pytest

import worker.peers
from cpd.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.local import LocalNetwork, LocalTransport
from worker.peers import Peers


def transport(network: LocalNetwork) -> LocalTransport:
    memory = np.zeros((4, 16), np.int64)
    return network.create(PoolMemory(memory.ctypes.data, 4, memory[0].nbytes), epoch=1)


async def test_fills_share_a_connection_also_while_it_is_made() -> None:
    network = LocalNetwork()
    peers, there = Peers(transport(network)), transport(network)

    async def use() -> object:
        async with peers.use(there.address) as peer:
            return peer

    assert len(set(await asyncio.gather(*(use() for _ in range(5))))) == 1
    await peers.close()
    assert not there.connections


async def test_a_broken_connection_is_replaced_for_the_next_one() -> None:
    network = LocalNetwork()
    peers, there = Peers(transport(network)), transport(network)
    async with peers.use(there.address) as old:
        await old.close()
        async with peers.use(there.address) as new:
            assert new is not old
            assert new.alive
    async with peers.use(there.address) as again:
        assert again is new
    await peers.close()


async def test_an_address_where_nobody_answers_is_tried_again_next_time() -> None:
    peers = Peers(transport(LocalNetwork()))
    for _ in range(2):
        with pytest.raises(TransferError):
            async with peers.use(b"nobody"):
                pass
    assert not peers._entries


async def test_the_longest_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.peers, "MAX_IDLE", 1)
    network = LocalNetwork()
    peers, first, second = Peers(transport(network)), transport(network), transport(network)
    for there in (first, second):
        async with peers.use(there.address):
            pass
    assert not first.connections
    assert second.connections
    await peers.close()

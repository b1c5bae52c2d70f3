"""Pages in the stream of a connection. The contract and the faults are in test_contract.py and test_processes.py."""

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtransfer
from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.nixl.connection import read_frame
from kvtransfer.nixl.handshake import Address, ReceiverPool, SenderDetails
from kvtransfer.nixl.page_stream import PageStreamReceiver
from kvtransfer.session import frames
from kvtransfer.session.greeting import SenderGreeting
from tests.kvtransfer.pools import Pool, Streamed, ticket
from tests.waiting import DEADLINE_S

PAGES, PAGE_BYTES = 64, 1 << 20


@pytest.fixture
async def network() -> AsyncIterator[Streamed]:
    network = Streamed()
    yield network
    await network.close()


def granted(pool: Pool, *places: tuple[int, int]) -> PageStreamReceiver:
    """A receiver that has granted batch 1: bytes of the pool, as (offset, number)."""
    receiver = PageStreamReceiver()
    offsets, sizes = np.array(places, np.uint64).T
    receiver.expect(1, offsets + np.uint64(pool.memory.pointer), sizes)
    return receiver


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 9), max_size=20))
def test_a_batch_arrives_however_it_was_cut(sizes: list[int], cuts: list[int]) -> None:
    pool, content = Pool(10, 10), bytes(range(1, sum(sizes) + 1))
    receiver = granted(pool, *((10 * page, size) for page, size in enumerate(sizes)))
    for cut in [*cuts, len(content)]:
        data, content = content[:cut], content[cut:]
        receiver.put(frames.Pages(1, data))
    receiver.finish(1)
    expected, first = Pool(10, 10).pages, 1
    for page, size in enumerate(sizes):
        expected[page, :size] = range(first, first + size)
        first += size
    assert (pool.pages == expected).all()


def test_what_was_not_granted_is_refused_and_not_written() -> None:
    pool = Pool(4, 10)
    receiver = granted(pool, (0, 10))
    for batch, data in [(2, bytes(1)), (1, bytes(11))]:
        with pytest.raises(TransferError, match="more of batch"):
            receiver.put(frames.Pages(batch, data))
    assert pool.untouched([1, 2, 3])


def test_a_batch_that_ends_too_soon_is_refused() -> None:
    receiver = granted(Pool(4, 10), (0, 10))
    receiver.put(frames.Pages(1, bytes(9)))
    with pytest.raises(TransferError, match="too soon"):
        receiver.finish(1)


@pytest.mark.parametrize(
    "lie",
    [
        [frames.Pages(0, bytes(PAGE_BYTES // 2))],
        [frames.Offer(0, 1, 1, 1, runs=((0, 1),)), frames.Sent(0)],
        [frames.Offer(0, 1, 1, 1, runs=((0, 1),)), *[frames.Pages(0, bytes(PAGE_BYTES // 2 + 1))] * 2],
    ],
    ids=["no grant", "nothing sent", "too much sent"],
)
async def test_a_sender_that_lies_is_cut_off_and_its_landing_fails(network: Streamed, lie: list[frames.Frame]) -> None:
    pool = Pool(4, PAGE_BYTES)
    receiver = await network.open(pool)
    landing = receiver.expect(1, 1, [2])
    where = Address.decode(receiver.address)
    details = SenderDetails(bytes(16), ProcessIdentity.own(), on_device=False, same_host=False, loads_nixl=True)
    greeting = SenderGreeting(where.key, PAGE_BYTES, details.encode())
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(frames.encode(greeting.hello))
        welcome = frames.decode(await read_frame(reader))
        assert isinstance(welcome, frames.Welcome)
        writer.writelines(map(frames.encode, [greeting.answer(welcome), *lie]))
        frame: frames.Frame = welcome
        while not isinstance(frame, frames.Stop):
            frame = frames.decode(await read_frame(reader))
        if isinstance(lie[0], frames.Offer):
            with pytest.raises(TransferError, match="batch 0"):
                await landing.done()
        landing.revoke()
        await landing.peer_gone()
        writer.close()
    assert pool.untouched([0, 1, 3])


async def test_others_run_while_pages_move(network: Streamed) -> None:
    target, source = Pool(PAGES, PAGE_BYTES), Pool(PAGES, PAGE_BYTES, seed=1)
    receiver, sender = await network.open(target), await network.open(source)
    peer = await sender.connect(receiver.address)
    receiver.expect(1, 1, range(PAGES))
    slices = 0

    async def count() -> None:
        nonlocal slices
        while True:
            await asyncio.sleep(0)
            slices += 1

    counting = asyncio.create_task(count())
    await peer.push(ticket(receiver, 1, 1, range(PAGES)), [(k, k) for k in range(PAGES)]).done()
    counting.cancel()
    assert slices >= PAGES * PAGE_BYTES / (256 << 10)
    assert (target.pages == source.pages).all()


@pytest.mark.parametrize("kinds", [("ucx", "nixl"), ("nixl", "ucx")], ids=["ucx to nixl", "nixl to ucx"])
@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "network"])
async def test_transports_that_differ_connect_without_nixl(kinds: tuple[str, str], same_host: bool) -> None:
    target, source = Pool(4), Pool(4, seed=1)
    sender = await kvtransfer.create(kinds[0], source.memory, epoch=1, host="127.0.0.1", same_host=same_host)
    receiver = await kvtransfer.create(kinds[1], target.memory, epoch=2, host="127.0.0.1", same_host=same_host)
    peer = await sender.connect(receiver.common_address)
    assert peer.route == ("memory" if same_host else "network")
    landing = receiver.expect(1, 1, [2])
    async with asyncio.timeout(DEADLINE_S):
        await peer.push(ticket(receiver, 1, 1, [2]), [(3, 0)]).done()
        await landing.done()
    assert (target.pages[2] == source.pages[3]).all()
    assert not any(name.startswith("nixl_cu") for name in sys.modules)
    await sender.close()
    await receiver.close()


async def test_pages_of_a_gpu_are_not_exchanged_with_host_memory() -> None:
    gpu = await kvtransfer.create("nixl", Pool(4, device=0).memory, epoch=1, host="127.0.0.1")
    host = await kvtransfer.create("ucx", Pool(4).memory, epoch=1, host="127.0.0.1")
    for sender, receiver in [(gpu, host), (host, gpu)]:
        with pytest.raises(TransferError, match="such a pair exchanges no pages"):
            await sender.connect(receiver.common_address)
    await gpu.close()
    await host.close()


async def test_a_process_without_nixl_does_not_load_it_for_a_peer(
    network: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = await network.open(Pool(4)), await network.open(Pool(4))
    monkeypatch.setattr(ReceiverPool, "decode", lambda data: ReceiverPool(0, 4, None, None, b"agent"))
    with pytest.raises(TransferError, match="does not load"):
        await sender.connect(receiver.address)


async def test_a_gpus_pages_are_not_put_into_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = await kvtransfer.create("nixl", Pool(4, device=0).memory, epoch=1, host="127.0.0.1")
    receiver = await kvtransfer.create("nixl", Pool(4).memory, epoch=1, host="127.0.0.1")
    lie = SenderDetails(bytes(16), ProcessIdentity.own(), on_device=False, same_host=False, loads_nixl=False)
    monkeypatch.setattr(SenderDetails, "decode", lambda data: lie)
    with pytest.raises(TransferError, match="no way for pages in a GPU"):
        await gpu.connect(receiver.address)
    await gpu.close()
    await receiver.close()

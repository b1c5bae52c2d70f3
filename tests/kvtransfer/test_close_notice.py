"""Close notices: a connection breaks between two live processes, and its pages are freed when the last write has ended.

Here both ends are in one process, and frames pass through a proxy that breaks; see test_processes.py for two.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from cpd.common.errors import TransferError
from kvtransfer.base import Landing, Transfer, Transport
from kvtransfer.nixl.connection import read_frame
from kvtransfer.nixl.handshake import Address
from kvtransfer.nixl.same_host import SameHostBackend
from kvtransfer.session import frames
from kvtransfer.session.greeting import close_notice
from tests.kvtransfer.breaking_proxy import BreakingProxy
from tests.kvtransfer.pools import EMPTY, Pool, Real, ticket
from tests.kvtransfer.remote import within
from tests.waiting import eventually

pytestmark = pytest.mark.nixl

PAGES, PAGE_BYTES = 48, 1 << 20
"""The pool has six batches."""


class Gate:
    """Holds every write up: memory is too fast to observe a write otherwise."""

    def __init__(self) -> None:
        self.writing = 0
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def passed(self, write: Callable[..., int]) -> Callable[..., int]:
        def gated(*arguments: object) -> int:
            self.writing += 1
            self._open.wait()
            try:
                return write(*arguments)
            finally:
                self.writing -= 1

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(SameHostBackend, "write", gate.passed(SameHostBackend.write))
    yield gate
    gate.open()


@pytest.fixture
async def network(gate: Gate) -> AsyncIterator[Real]:
    network = Real("nixl")
    yield network
    gate.open()
    await within(network.close())


@pytest.fixture
def pool() -> Pool:
    return Pool(PAGES, PAGE_BYTES)


@pytest.fixture
def source() -> Pool:
    return Pool(PAGES, PAGE_BYTES, seed=1)


@pytest.fixture
async def receiver(network: Real, pool: Pool) -> Transport:
    return await network.open(pool)


@pytest.fixture
async def proxy(receiver: Transport) -> AsyncIterator[BreakingProxy]:
    proxy = await BreakingProxy.to(receiver.address)
    yield proxy
    proxy.close()


@pytest.fixture
async def sender(network: Real, source: Pool) -> Transport:
    return await network.open(source)


async def push(sender: Transport, proxy: BreakingProxy, receiver: Transport) -> tuple[Landing, Transfer]:
    """A landing of all pages, and a transfer into it through the proxy."""
    peer = await sender.connect(proxy.address)
    landing = receiver.expect(1, 1, range(PAGES))
    return landing, peer.push(ticket(receiver, 1, 1, range(PAGES)), [(k, k) for k in range(PAGES)])


def at(kind: type[frames.Frame], k: int) -> Callable[[frames.Frame], Awaitable[bool]]:
    """True for the k-th frame of a kind, counted from 0."""
    left = k

    async def is_it(frame: frames.Frame) -> bool:
        nonlocal left
        left -= isinstance(frame, kind)
        return isinstance(frame, kind) and left == -1

    return is_it


@pytest.mark.parametrize(
    ("kind", "k"),
    [(frames.Offer, k) for k in (1, 3, 5)]  # without the first one a landing has no sender
    + [(kind, k) for kind in (frames.Grant, frames.Sent) for k in (0, 1, 3, 5)],
)
async def test_a_broken_connections_pages_are_freed_and_not_written_after_that(
    sender: Transport,
    receiver: Transport,
    proxy: BreakingProxy,
    pool: Pool,
    gate: Gate,
    kind: type[frames.Frame],
    k: int,
) -> None:
    proxy.breaks = at(kind, k)
    landing, transfer = await push(sender, proxy, receiver)
    with pytest.raises(TransferError, match="reset"):
        await within(landing.done())
    await within(landing.peer_gone())
    assert gate.writing == 0
    assert landing.revoke()
    pool.pages[:] = EMPTY
    with pytest.raises(TransferError):
        await within(transfer.done())
    assert proxy.broken == 1
    assert pool.untouched()
    receiver.expect(2, 1, range(PAGES))


async def test_a_connection_that_breaks_after_the_last_page_leaves_the_landing_complete(
    sender: Transport, receiver: Transport, proxy: BreakingProxy, pool: Pool
) -> None:
    proxy.breaks = at(frames.Done, 5)
    landing, transfer = await push(sender, proxy, receiver)
    await within(landing.done())
    with pytest.raises(TransferError, match="reset"):
        await within(transfer.done())
    assert landing.revoke()
    assert not pool.untouched([PAGES - 1])


async def test_pages_stay_in_quarantine_until_the_last_write_is_over(
    network: Real, sender: Transport, receiver: Transport, proxy: BreakingProxy, pool: Pool, gate: Gate
) -> None:
    gate.shut()
    landing, transfer = await push(sender, proxy, receiver)
    await eventually(lambda: gate.writing == 1)
    proxy.reset()
    with pytest.raises(TransferError, match="reset"):
        await within(landing.done())
    gone = asyncio.create_task(landing.peer_gone())
    for _ in range(10):  # takes a while in which nothing ends the quarantine
        await (await within((await network.open(Pool(1, PAGE_BYTES))).connect(receiver.address))).close()
    assert not gone.done()
    assert not landing.revoke()
    with pytest.raises(ValueError, match="still open"):
        receiver.expect(2, 1, [0])
    gate.open()
    await within(gone)
    assert gate.writing == 0
    assert not pool.untouched([0])  # while it was in quarantine
    pool.pages[:] = EMPTY
    with pytest.raises(TransferError):
        await within(transfer.done())
    assert pool.untouched()


async def test_a_close_notice_is_repeated_until_it_is_acknowledged(
    sender: Transport, receiver: Transport, proxy: BreakingProxy
) -> None:
    often = iter([frames.Grant, frames.CloseNotice, frames.CloseAck, frames.CloseNotice])
    awaited: type[frames.Frame] | None = next(often)

    async def breaks(frame: frames.Frame) -> bool:
        nonlocal awaited
        if awaited is None or not isinstance(frame, awaited):
            return False
        awaited = next(often, None)
        return True

    proxy.breaks = breaks
    landing, _ = await push(sender, proxy, receiver)
    await within(landing.peer_gone())
    await eventually(lambda: proxy.broken == 4)
    assert landing.revoke()


async def test_closing_the_receiver_waits_for_the_close_notice(
    network: Real, sender: Transport, receiver: Transport, proxy: BreakingProxy, gate: Gate
) -> None:
    gate.shut()
    await push(sender, proxy, receiver)
    await eventually(lambda: gate.writing == 1)
    proxy.reset()
    closing = asyncio.create_task(receiver.close())
    late = await network.open(Pool(1, PAGE_BYTES))
    with pytest.raises(TransferError, match="was closed"):
        await within(late.connect(receiver.address))
    assert not closing.done()
    gate.open()
    await within(closing)
    assert gate.writing == 0
    with pytest.raises(TransferError, match="no connection"):
        await within(late.connect(receiver.address))


@pytest.mark.parametrize("known", ["neither", "the key"])
async def test_only_the_sender_can_end_a_quarantine(
    sender: Transport, receiver: Transport, proxy: BreakingProxy, gate: Gate, known: str
) -> None:
    gate.shut()
    landing, _ = await push(sender, proxy, receiver)
    await eventually(lambda: gate.writing == 1)
    proxy.reset()
    with pytest.raises(TransferError):
        await within(landing.done())
    where = Address.decode(receiver.address)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(frames.encode(close_notice(where.key if known == "the key" else bytes(16), bytes(16))))
    answer = frames.decode(await within(read_frame(reader)))
    assert isinstance(answer, frames.CloseAck if known == "the key" else frames.Reject)
    writer.close()
    assert not landing.revoke()
    gate.open()
    await within(landing.peer_gone())

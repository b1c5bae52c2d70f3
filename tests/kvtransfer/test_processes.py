"""Every transport between real processes, one of which is killed, stopped or restarted."""

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import kvtransfer
from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.base import Landing, Transport
from kvtransfer.landings import LandingEntry
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving
from kvtransfer.session.sending import Sending
from tests.kvtransfer import fake_gpu
from tests.kvtransfer.breaking_proxy import BreakingProxy
from tests.kvtransfer.pools import EMPTY, Pool, ticket
from tests.kvtransfer.remote import PAGE_BYTES, PAGES, Remote, within
from tests.waiting import eventually


@dataclass(frozen=True)
class Setup:
    """A transport, and the kind of its peers and pools.

    Attributes:
        name: Name of the transport.
        elsewhere: True if the two processes believe that they run on different machines.
        gpu: True if the pools are in (fake) GPU memory.
        theirs: Name of the other process's transport, if it is another one.
    """

    name: str
    elsewhere: bool = False
    gpu: bool = False
    theirs: str = ""

    def pool(self, num_pages: int = PAGES, page_bytes: int = PAGE_BYTES) -> Pool:
        """An empty pool for this process."""
        return Pool(num_pages, page_bytes, device=fake_gpu.DEVICE if self.gpu else None)

    async def start(self, seed: int, num_pages: int = PAGES, page_bytes: int = PAGE_BYTES) -> Remote:
        """Starts another process."""
        name = self.theirs or self.name
        return await Remote.start(name, seed, num_pages, page_bytes, gpu=self.gpu, differs=bool(self.theirs))


def _nixl(id: str, *, elsewhere: bool = False, gpu: bool = False) -> ParameterSet:
    return pytest.param(Setup("nixl", elsewhere, gpu), id=id, marks=pytest.mark.nixl)


UCX = pytest.param(Setup("ucx"), id="ucx")
# Pairs that differ use no NIXL, so that ucxx may be in the same process.
SAME_HOST = [
    _nixl("nixl, one machine"),
    _nixl("nixl, one machine, GPUs", gpu=True),
    pytest.param(Setup("ucx", theirs="nixl"), id="ucx with nixl, one machine"),
    pytest.param(Setup("nixl", theirs="ucx"), id="nixl with ucx, one machine"),
]
NETWORK = [
    _nixl("nixl, two machines", elsewhere=True),
    _nixl("nixl, two machines, GPUs", elsewhere=True, gpu=True),
    pytest.param(Setup("ucx", theirs="nixl", elsewhere=True), id="ucx with nixl, two machines"),
    pytest.param(Setup("nixl", theirs="ucx", elsewhere=True), id="nixl with ucx, two machines"),
]

cut_off = pytest.mark.parametrize("setup", [UCX, *NETWORK], indirect=True)
in_quarantine = pytest.mark.parametrize("setup", SAME_HOST, indirect=True)


@pytest.fixture(params=[UCX, *SAME_HOST, *NETWORK])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setup:
    setup: Setup = request.param
    if setup.elsewhere:
        identity = dataclasses.replace(ProcessIdentity.own(), boot=bytes(16))
        monkeypatch.setattr(ProcessIdentity, "own", lambda: identity)
    if setup.gpu:
        fake_gpu.install(monkeypatch)
    return setup


@pytest.fixture
async def remotes() -> AsyncIterator[list[Remote]]:
    """Processes in this list are killed after the test."""
    remotes: list[Remote] = []
    yield remotes
    for remote in remotes:
        await remote.kill()


@pytest.fixture
async def remote(setup: Setup, remotes: list[Remote]) -> Remote:
    remotes.append(await setup.start(seed=5))
    return remotes[-1]


@pytest.fixture
def pool(setup: Setup) -> Pool:
    return setup.pool()


@pytest.fixture
async def transport(setup: Setup, pool: Pool, remotes: list[Remote]) -> AsyncIterator[Transport]:
    transport = await kvtransfer.create(setup.name, pool.memory, epoch=77, host="127.0.0.1")
    if setup.theirs:
        transport.address = transport.common_address
    yield transport
    for remote in remotes:  # closing would wait for a stopped one
        await remote.kill()
    await within(transport.close())


async def works(transport: Transport, pool: Pool) -> None:
    """Checks that the transport still receives from others."""
    source = Pool(4, PAGE_BYTES, seed=6, device=pool.memory.device)
    other = await kvtransfer.create(transport.name, source.memory, epoch=1, host="127.0.0.1")
    peer = await within(other.connect(transport.address))
    landing = transport.expect(99, 1, [7, 150])
    await within(peer.push(ticket(transport, 99, 1, [7, 150]), [(3, 0), (2, 1)]).done())
    await within(landing.done())
    assert (pool.pages[[7, 150]] == source.pages[[3, 2]]).all()
    await within(other.close())


async def stopped_amid_a_push(
    transport: Transport, pool: Pool, remote: Remote
) -> "tuple[Landing, asyncio.Future[dict[str, Any]]]":
    """A landing whose sender is stopped with granted batches, and the sender's answer, which is still to come."""
    await remote.connect(transport.address)
    landing = transport.expect(1, 1, range(PAGES))
    with at_batch(2, Receiving, "admit", remote.stop):
        answer = remote.push(ticket(transport, 1, 1, range(PAGES)), [(0, k) for k in range(PAGES)])
        await eventually(lambda: remote.state == "T")
    await asyncio.sleep(0.05)  # time to read what it has sent
    assert isinstance(landing, LandingEntry)
    assert landing.begun
    return landing, answer


@contextmanager
def at_batch(number: int, kind: type, method: str, act: Callable[[], None]) -> Iterator[None]:
    """Acts just before this side handles an offer or grant of this batch: during the push, however fast it is."""
    handle = getattr(kind, method)

    def handled(self: Any, frame: frames.Offer | frames.Grant) -> Any:
        if frame.batch == number:
            act()
        return handle(self, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, handled)
        yield


@contextmanager
def limit(name: str, seconds: float) -> Iterator[None]:
    """Shortens a limit of `kvtransfer.session.limits`, while a peer is stopped: one that runs may be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"kvtransfer.session.limits.{name}", seconds)
        yield


async def test_pages_cross_between_processes(transport: Transport, pool: Pool, remote: Remote) -> None:
    await remote.connect(transport.address)
    landing = transport.expect(1, 1, range(PAGES))
    answer = remote.push(ticket(transport, 1, 1, range(PAGES)), [(PAGES - 1 - k, k) for k in range(PAGES)])
    await within(landing.done())
    assert (await within(answer))["ok"]
    assert (pool.pages[::-1] == Pool(PAGES, PAGE_BYTES, seed=5).pages).all()
    assert await remote.end() == 0


@pytest.mark.parametrize("when", ["before it pushed", "amid its push", "between its pushes"])
async def test_a_killed_sender_fails_its_landing_within_seconds(
    transport: Transport, pool: Pool, remote: Remote, when: str
) -> None:
    await remote.connect(transport.address)
    landing = transport.expect(1, 1, range(PAGES))  # one page more than is pushed
    current = ticket(transport, 1, 1, range(PAGES))
    if when == "amid its push":
        remote.push(current, [(0, k) for k in range(PAGES - 1)])
        await eventually(lambda: not pool.untouched([0]))
    elif when == "between its pushes":
        assert (await within(remote.push(current, [(0, 0), (1, 1)])))["ok"]
    await remote.kill()
    if when == "before it pushed":  # a landing learns its sender from the first push
        assert landing.revoke()
        with pytest.raises(TransferError, match="revoked"):
            await within(landing.done())
    else:
        with pytest.raises(TransferError, match="reset"):
            await within(landing.done())
    await within(landing.peer_gone())
    assert landing.revoke()
    pool.pages[:] = EMPTY
    await works(transport, pool)
    assert pool.untouched(range(8, 150))


@pytest.mark.parametrize("when", ["before the push", "amid the push"])
async def test_a_killed_receiver_fails_the_push_within_seconds(
    transport: Transport, pool: Pool, remote: Remote, when: str
) -> None:
    address = await remote.address()
    peer = await transport.connect(address)
    current = await remote.expect(range(PAGES))
    await within(peer.push(current, [(0, 0)]).done())
    if when == "before the push":
        await remote.kill()
        await eventually(lambda: not peer.alive)
        transfer = peer.push(current, [(0, 1)])
    else:
        with at_batch(3, Sending, "granted", lambda: remote.signal(signal.SIGKILL)):
            transfer = peer.push(current, [(0, k) for k in range(1, PAGES)])
            await remote.ended()
    with pytest.raises(TransferError):
        await within(transfer.done())
    assert not peer.alive
    await works(transport, pool)


async def test_a_restarted_peer_is_found_at_its_new_address_and_not_at_the_old(
    setup: Setup, transport: Transport, remote: Remote, remotes: list[Remote]
) -> None:
    old = await remote.address()
    await transport.connect(old)
    await remote.kill()
    with pytest.raises(TransferError, match="no connection"):
        await within(transport.connect(old))
    remotes.append(await setup.start(seed=8))
    new = await remotes[-1].address()
    peer = await within(transport.connect(new))
    await within(peer.push(await remotes[-1].expect([3]), [(0, 0)]).done())
    assert (await within(remotes[-1].order("land", pages=[3])))["first_bytes"] == [EMPTY]


@cut_off
async def test_a_stopped_sender_is_cut_off_and_writes_nothing_after_its_landing_settled(
    transport: Transport, pool: Pool, remote: Remote
) -> None:
    landing, answer = await stopped_amid_a_push(transport, pool, remote)
    with pytest.raises(ValueError, match="still open"):
        transport.expect(2, 1, [0])
    with limit("STALL_S", 0.5), pytest.raises(TransferError, match="did nothing"):
        await within(landing.done())
    await within(landing.peer_gone())
    assert landing.revoke()
    pool.pages[:] = EMPTY
    remote.signal(signal.SIGCONT)
    assert not (await within(answer))["ok"]
    assert pool.untouched()
    await works(transport, pool)
    assert pool.untouched(range(8, 150))


async def test_a_revoked_landing_of_a_stopped_sender_is_given_up_sooner(
    transport: Transport, pool: Pool, remote: Remote
) -> None:
    landing, answer = await stopped_amid_a_push(transport, pool, remote)
    with limit("GRACE_S", 0.5):
        assert not landing.revoke()
        with pytest.raises(TransferError, match="revoked"):
            await within(landing.done())
        remote.signal(signal.SIGCONT)
        await within(landing.peer_gone())
    pool.pages[:] = EMPTY
    assert not (await within(answer))["ok"]
    assert pool.untouched()


@in_quarantine
@pytest.mark.parametrize("end", ["it continues", "it is killed"])
async def test_a_stopped_senders_pages_stay_in_quarantine_until_its_close_notice_or_its_end(
    transport: Transport, pool: Pool, remote: Remote, end: str
) -> None:
    landing, answer = await stopped_amid_a_push(transport, pool, remote)
    with limit("STALL_S", 0.5), pytest.raises(TransferError, match="did nothing"):
        await within(landing.done())
    assert not landing.revoke()
    gone = asyncio.create_task(landing.peer_gone())
    await works_beside(transport)  # takes a while in which nothing ends the quarantine
    assert not gone.done()
    with pytest.raises(ValueError, match="still open"):
        transport.expect(2, 1, [0])
    if end == "it continues":
        remote.signal(signal.SIGCONT)
        assert not (await within(answer))["ok"]
    else:
        await remote.kill()
    await within(gone)
    assert landing.revoke()
    pool.pages[:] = EMPTY
    await works(transport, pool)
    assert pool.untouched(range(8, 150))


@in_quarantine
@pytest.mark.parametrize("end", ["it continues", "it is killed"])
async def test_a_stopped_senders_pages_stay_in_quarantine_also_if_its_connection_breaks(
    transport: Transport, pool: Pool, remote: Remote, end: str
) -> None:
    proxy = await BreakingProxy.to(transport.address)

    async def stops(frame: frames.Frame) -> bool:
        """The sender stops with one batch written but not reported as sent, and others granted."""
        if not isinstance(frame, frames.Sent):
            return False
        remote.stop()
        return True

    proxy.breaks = stops
    await remote.connect(proxy.address)
    landing = transport.expect(1, 1, range(PAGES))
    answer = remote.push(ticket(transport, 1, 1, range(PAGES)), [(0, k) for k in range(PAGES)])
    with pytest.raises(TransferError, match="reset"):
        await within(landing.done())
    gone = asyncio.create_task(landing.peer_gone())
    await works_beside(transport)  # takes a while in which nothing ends the quarantine
    assert not gone.done()
    assert not landing.revoke()
    if end == "it continues":
        remote.signal(signal.SIGCONT)
        assert not (await within(answer))["ok"]
    else:
        await remote.kill()
    await within(gone)
    assert landing.revoke()
    pool.pages[:] = EMPTY
    await works(transport, pool)
    assert pool.untouched(range(8, 150))
    proxy.close()


async def works_beside(transport: Transport) -> None:
    """Checks that the transport still connects to itself, which takes some time."""
    for _ in range(10):
        peer = await within(transport.connect(transport.address))
        await within(peer.close())


@in_quarantine
async def test_closing_waits_for_a_stopped_sender(transport: Transport, pool: Pool, remote: Remote) -> None:
    landing, _ = await stopped_amid_a_push(transport, pool, remote)
    closing = asyncio.create_task(transport.close())
    with pytest.raises(TransferError, match="closed"):
        await within(landing.done())
    assert not closing.done()
    await remote.kill()
    await within(closing)
    assert landing.revoke()


async def test_a_stopped_sender_that_continues_in_time_completes_its_landing(
    transport: Transport, pool: Pool, remote: Remote
) -> None:
    await remote.connect(transport.address)
    landing = transport.expect(1, 1, range(PAGES))
    answer = remote.push(ticket(transport, 1, 1, range(PAGES)), [(k, k) for k in range(PAGES)])
    await eventually(lambda: not pool.untouched([0]))
    remote.stop()
    remote.signal(signal.SIGCONT)
    await within(landing.done())
    assert (await within(answer))["ok"]
    assert (pool.pages == Pool(PAGES, PAGE_BYTES, seed=5).pages).all()


async def test_a_transfer_to_a_stopped_receiver_can_be_cancelled(
    transport: Transport, pool: Pool, remote: Remote
) -> None:
    address = await remote.address()
    peer = await transport.connect(address)
    current = await remote.expect(range(PAGES))
    remote.stop()
    with limit("GRACE_S", 0.5):
        transfer = peer.push(current, [(0, k) for k in range(PAGES)])
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            await within(transfer.done())
    await works(transport, pool)


async def test_a_receiver_that_stays_stopped_fails_the_push_by_itself(transport: Transport, remote: Remote) -> None:
    address = await remote.address()
    peer = await transport.connect(address)
    current = await remote.expect([1, 2])
    remote.stop()
    with limit("STALL_S", 0.5), pytest.raises(TransferError, match="did nothing"):
        await within(peer.push(current, [(0, 0)]).done())
    assert not peer.alive


async def test_a_process_that_never_closes_its_transport_ends_cleanly(transport: Transport, remote: Remote) -> None:
    await remote.connect(transport.address)
    assert await remote.end() == 0


@pytest.mark.parametrize("page_bytes", [16 << 10, 2_359_296])
async def test_senders_killed_at_any_moment_never_harm_the_receiver(
    setup: Setup, page_bytes: int, remotes: list[Remote]
) -> None:
    pool = setup.pool((128 << 20) // page_bytes, page_bytes)
    pages = range(len(pool.pages))
    transport = await kvtransfer.create(setup.name, pool.memory, epoch=78, host="127.0.0.1")
    address = transport.common_address if setup.theirs else transport.address
    for reservation in range(3):
        remote = await setup.start(seed=reservation, num_pages=8, page_bytes=page_bytes)
        remotes.append(remote)
        await remote.connect(address)
        landing = transport.expect(reservation, 1, pages)
        remote.push(ticket(transport, reservation, 1, pages), [(0, k) for k in pages[:-1]])
        until = len(pages) * reservation // 4
        await eventually(lambda until=until: not pool.untouched([until]))  # type: ignore[misc]
        await remote.kill()
        with pytest.raises(TransferError):
            await within(landing.done())
        await within(landing.peer_gone())
        pool.pages[:] = EMPTY
    await transport.close()
    assert pool.untouched()

"""Behaviour of the UCX transport only: addresses, permissions, leaks, peers that break the protocol."""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import kvtransfer
from cpd.common.errors import ConfigError, StaleTransferError, TransferError
from kvtransfer.base import Transport
from kvtransfer.landings import LandingEntry
from kvtransfer.session import frames
from kvtransfer.session.greeting import SenderGreeting
from kvtransfer.session.limits import WINDOW
from kvtransfer.session.receiving import Receiving
from kvtransfer.ucx.connection import FRAME_BYTES, Connection
from kvtransfer.ucx.reactor import Reactor
from kvtransfer.ucx.transport import Address, ucx_options
from tests.kvtransfer.pools import Pool, Real, ticket
from tests.waiting import DEADLINE_S, eventually


@pytest.fixture
async def network() -> AsyncIterator[Real]:
    network = Real("ucx")
    yield network
    await network.close()


async def lands(network: Real, receiver: Transport, target: Pool) -> None:
    """Checks that the receiver still receives."""
    source = Pool(4, seed=1)
    peer = await (await network.open(source)).connect(receiver.address)
    landing = receiver.expect(900, 1, [1, 3])
    async with asyncio.timeout(DEADLINE_S):
        await peer.push(ticket(receiver, 900, 1, [1, 3]), [(0, 0), (2, 1)]).done()
        await landing.done()
    assert (target.pages[[1, 3]] == source.pages[[0, 2]]).all()


def listening() -> list[tuple[str, int]]:
    """The addresses this process listens on."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    with open("/proc/self/net/tcp") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ip, port = fields[1].split(":")
                found.append((socket.inet_ntoa(bytes.fromhex(ip)[::-1]), int(port, 16)))
    return found


async def test_it_listens_on_its_host_only(network: Real) -> None:
    receiver = await network.open(Pool(4))
    assert {ip for ip, _ in listening()} == {"127.0.0.1"}
    assert Address.decode(receiver.address).port in {port for _, port in listening()}


async def test_it_listens_everywhere_when_told_so(network: Real) -> None:
    pool = Pool(4)
    transport = await kvtransfer.create("ucx", pool.memory, epoch=1, host="0.0.0.0", advertise_host="localhost")
    try:
        await lands(network, transport, pool)
    finally:
        await transport.close()


@pytest.mark.parametrize("error", [None, "peer", "push", "connect"])
async def test_nothing_is_left_behind(error: str | None) -> None:
    def resources() -> list[str]:
        gc.collect()
        files = []
        for name in os.listdir("/proc/self/fd"):
            try:
                files.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:  # the directory's own
                continue
        return sorted(files) + [thread.name for thread in threading.enumerate()]

    async def once() -> None:
        network, source, target = Real("ucx"), Pool(64, 1 << 18, seed=1), Pool(64, 1 << 18)
        sender, receiver = await network.open(source), await network.open(target)
        for delay in (0.0, 0.002, 0.004, 0.008) if error == "connect" else ():
            attempt = asyncio.create_task(sender.connect(receiver.address))
            await asyncio.wait([attempt], timeout=delay)
            attempt.cancel()
            await asyncio.wait([attempt])
        peer = await sender.connect(receiver.address)
        receiver.expect(1, 1, range(64))
        transfer = peer.push(ticket(receiver, 1, 1, range(64)), [(k, 63 - k) for k in range(64)])
        if error in (None, "connect"):
            await transfer.done()
        elif error == "peer":
            await peer.close()
        else:
            await eventually(lambda: not target.untouched([63]))
            await receiver.close()
        await network.close()

    await once()  # UCX keeps some things for the life of the process
    before, tasks = resources(), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        await once()
    assert resources() == before
    assert len(os.listdir("/proc/self/task")) <= tasks


async def test_a_process_that_forgets_to_close_ends_quietly() -> None:
    program = """
import asyncio, kvtransfer
from tests.kvtransfer.pools import Pool, ticket
async def main():
    a, b = Pool(64, 1 << 20), Pool(64, 1 << 20)
    receiver = await kvtransfer.create("ucx", a.memory, epoch=1, host="127.0.0.1")
    sender = await kvtransfer.create("ucx", b.memory, epoch=1, host="127.0.0.1")
    receiver.expect(1, 1, range(64))
    peer = await sender.connect(receiver.address)
    peer.push(ticket(receiver, 1, 1, range(64)), [(k, k) for k in range(64)])
asyncio.run(main())
"""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.communicate() == (b"", b"")
    assert process.returncode == 0


async def test_a_key_that_is_not_the_receivers_is_refused_as_stale(network: Real) -> None:
    target = Pool(4)
    receiver, sender = await network.open(target), await network.open(Pool(4))
    address = replace(Address.decode(receiver.address), key=bytes(16))
    with pytest.raises(StaleTransferError, match="another transport"):
        await sender.connect(address.encode())
    await lands(network, receiver, target)


async def test_a_host_of_another_machine_is_an_error() -> None:
    pool = Pool(4)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9"):
        await kvtransfer.create("ucx", pool.memory, epoch=1, host="203.0.113.9")
    with pytest.raises(ConfigError, match="has no IP address"):
        await kvtransfer.create("ucx", pool.memory, epoch=1, host="no-such-host.invalid")


async def test_impossible_settings_are_a_configuration_error() -> None:
    pool = Pool(4)
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        await kvtransfer.create("carrier-pigeon", pool.memory, epoch=1, host="127.0.0.1")
    with pytest.raises(ConfigError, match="advertise-host"):
        await kvtransfer.create("ucx", pool.memory, epoch=1, host="0.0.0.0")


def test_operators_may_choose_ucx_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ucx_options("127.0.0.1")["NET_DEVICES"] == "lo"
    assert "NET_DEVICES" not in ucx_options("0.0.0.0")
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert (ucx_options("127.0.0.1")["TLS"], ucx_options("127.0.0.1")["NET_DEVICES"]) == ("rc,tcp", "mlx5_0:1")


# ---- peers that break the protocol


class MisbehavingPeer(Connection):
    """An end of a connection that sends given bytes and records what it gets.

    Args:
        greeting: Makes the proof that is sent after a Welcome.
        then: What is sent after the proof.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: Any,
        sent: list[bytes],
        greeting: SenderGreeting | None = None,
        then: Sequence[frames.Frame] = (),
    ) -> None:
        super().__init__(reactor, endpoint)
        self.got: list[frames.Frame] = []
        self._greeting, self._then = greeting, then
        for frame in sent:
            data = bytearray(frame)
            self._outbox.append((endpoint.stream_send(reactor.array(data)), data))

    def _handle(self, frame: frames.Frame) -> None:
        self.got.append(frame)
        if isinstance(frame, frames.Welcome) and self._greeting is not None:
            for one in (self._greeting.answer(frame), *self._then):
                self._send(one)

    def _advance(self) -> bool:
        return False

    def _page_requests(self) -> list[Any]:
        return []

    def _patience(self) -> float | None:
        return None

    def _lost(self, reason: str) -> None:
        pass


@asynccontextmanager
async def reactor_that_sends(*sent: frames.Frame) -> AsyncIterator[Reactor]:
    """A reactor for the test's own connections. It sends these frames to every peer and grants nothing."""

    def accept(endpoint: Any) -> None:
        MisbehavingPeer(made, endpoint, [padded(frame) for frame in sent])

    pool = Pool(4)
    made = Reactor(ucx_options("127.0.0.1"), "127.0.0.1", pool.memory, accept=accept, ended=lambda _: None)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def reactor() -> AsyncIterator[Reactor]:
    """A reactor that never greets."""
    async with reactor_that_sends() as made:
        yield made


async def misbehave(
    reactor: Reactor,
    address: Address,
    sent: list[bytes],
    greeting: SenderGreeting | None = None,
    then: Sequence[frames.Frame] = (),
) -> MisbehavingPeer:
    return await reactor.run(
        lambda: MisbehavingPeer(reactor, reactor.connect(address.host, address.port), sent, greeting, then)
    )


def padded(frame: frames.Frame) -> bytes:
    return frames.encode(frame).ljust(FRAME_BYTES, b"\0")


def wrong_frames(hello: frames.Frame) -> dict[str, list[bytes | frames.Frame]]:
    """What a misbehaving sender sends; frames after a Hello are sent after its Proof."""
    return {
        "noise": [bytes(range(256)) * 4],
        "an offer before the greeting": [padded(frames.Offer(1, 1, 900, 1, ((0, 1),)))],
        "an offer before the proof": [padded(hello), padded(frames.Offer(1, 1, 1, 1, ((0, 1),)))],
        "a wrong proof": [padded(hello), padded(frames.Proof(bytes(16)))],
        "two proofs": [hello, frames.Proof(bytes(16))],
        "two greetings": [hello, hello],
        "a frame of a receiver": [hello, frames.Grant(1, (1,))],
        "Sent of a batch that was not granted": [hello, frames.Sent(1)],
        "too many offers": [
            hello,
            *[frames.Offer(n, 1, 1, 1, ((n, 1),)) for n in range(WINDOW + 1)],
        ],
    }


@pytest.mark.parametrize("what", list(wrong_frames(frames.CloseAck())))
async def test_a_peer_that_breaks_the_protocol_loses_its_connection_and_nothing_else(
    network: Real, reactor: Reactor, what: str
) -> None:
    target = Pool(16)
    receiver = await network.open(target, epoch=1)
    landing = receiver.expect(1, 1, range(8, 16))
    address = Address.decode(receiver.address)
    greeting = SenderGreeting(address.key, target.memory.page_bytes)
    sent = wrong_frames(greeting.hello)[what]
    at_once = [one for one in sent if isinstance(one, bytes)] or [padded(greeting.hello)]
    then = [one for one in sent[1:] if not isinstance(one, bytes)]
    peer = await misbehave(reactor, address, at_once, greeting if then else None, then)
    await eventually(lambda: peer.failed)
    if isinstance(landing, LandingEntry) and landing.sender:
        with pytest.raises(TransferError):
            await landing.done()
    assert landing.revoke()
    assert target.untouched()
    await lands(network, receiver, target)


async def test_a_peer_that_never_greets_is_dropped(network: Real, reactor: Reactor) -> None:
    target = Pool(4)
    receiver = await network.open(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtransfer.session.limits.GREETING_S", 0.2)
        peer = await misbehave(reactor, Address.decode(receiver.address), [])
        await eventually(lambda: peer.failed)
    await lands(network, receiver, target)


@pytest.mark.parametrize("pages", [1, 8])
async def test_a_receiver_naps_while_much_is_under_way_but_not_for_a_sender_that_has_stopped(
    network: Real, reactor: Reactor, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    naps, sleep = [], time.sleep

    def counted(seconds: float) -> None:
        naps.append(seconds)
        sleep(seconds)

    monkeypatch.setattr("kvtransfer.session.limits.STALL_S", 0.2)
    monkeypatch.setattr("kvtransfer.ucx.reactor.time.sleep", counted)
    target = Pool(16, 1 << 20)
    receiver = await network.open(target)
    landing = receiver.expect(1, 1, range(8, 8 + pages))
    address = Address.decode(receiver.address)
    greeting = SenderGreeting(address.key, target.memory.page_bytes)
    offer = frames.Offer(1, 1, 1, 1, ((0, pages),))
    peer = await misbehave(reactor, address, [padded(greeting.hello)], greeting, [offer])
    with pytest.raises(TransferError, match="did nothing"):
        await landing.done()
    assert any(isinstance(frame, frames.Grant) for frame in peer.got)
    assert bool(naps) is (pages == 8)
    assert len(naps) < 100


async def test_a_receiver_that_never_greets_is_an_error_soon(
    network: Real, reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.session.limits.GREETING_S", 0.2)
    sender = await network.open(Pool(4))
    with pytest.raises(TransferError, match="did nothing"):
        await sender.connect(Address("127.0.0.1", reactor.port, bytes(16)).encode())


async def test_a_port_where_no_ucx_answers_is_an_error_soon(network: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.session.limits.GREETING_S", 0.2)
    sender = await network.open(Pool(4))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = Address("127.0.0.1", deaf.getsockname()[1], bytes(16))
        with pytest.raises(TransferError, match="no connection"):
            await sender.connect(address.encode())


async def test_a_cancelled_connection_attempt_leaves_no_connection(network: Real, reactor: Reactor) -> None:
    sender = await network.open(Pool(4))
    attempt = asyncio.create_task(sender.connect(Address("127.0.0.1", reactor.port, bytes(16)).encode()))
    await eventually(lambda: bool(reactor.channels))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await eventually(lambda: not reactor.channels)


async def test_connecting_can_be_cancelled_at_any_moment(network: Real) -> None:
    target = Pool(4)
    receiver, sender = await network.open(target), await network.open(Pool(4))
    for turns in range(30):
        attempt = asyncio.create_task(sender.connect(receiver.address))
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        attempt.cancel()
        (peer,) = await asyncio.gather(attempt, return_exceptions=True)
        if not isinstance(peer, BaseException):
            await peer.close()
    await lands(network, receiver, target)


async def test_a_fault_in_the_thread_fails_everything_instead_of_hanging(
    network: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a bug")

    receiver, sender = await network.open(Pool(4)), await network.open(Pool(4))
    peer = await sender.connect(receiver.address)
    landing = receiver.expect(1, 1, [1])
    monkeypatch.setattr(Receiving, "admit", fault)
    transfer = peer.push(ticket(receiver, 1, 1, [1]), [(0, 0)])
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransferError, match="a bug"):
            await landing.done()
        with pytest.raises(TransferError):
            await transfer.done()
        with pytest.raises(TransferError, match="a bug"):
            await receiver.connect(sender.address)
        with pytest.raises(TransferError, match="closed"):
            receiver.expect(2, 1, [2])

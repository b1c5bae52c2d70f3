"""Behaviour of the NIXL transport only; test_contract.py has what all transports share."""

import asyncio
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtransfer
from cpd.common.errors import ConfigError, StaleTransferError, TransferError
from cpd.common.process_identity import ProcessIdentity, wait_until_ended
from kvtransfer import addresses, cuda
from kvtransfer.nixl import agent
from kvtransfer.nixl.connection import read_frame
from kvtransfer.nixl.handshake import Address, ReceiverPool, SenderDetails
from kvtransfer.nixl.same_host import ForbiddenError, SameHostBackend
from kvtransfer.session import frames
from kvtransfer.session.greeting import ReceiverGreeting, SenderGreeting
from tests.kvtransfer import fake_gpu
from tests.kvtransfer.pools import Pool, Real, ticket
from tests.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.nixl


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Real]:
    """Closed before the patches of a test are undone."""
    network = Real("nixl")
    yield network
    await network.close()


keys = st.binary(min_size=16, max_size=16)
u64 = st.integers(0, 2**64 - 1)
processes = st.builds(ProcessIdentity, keys, u64, st.integers(1, 2**31 - 1), u64)


pools = st.builds(
    ReceiverPool,
    u64,
    st.integers(1, 1 << 24),
    st.none() | st.integers(0, 64),
    st.none() | processes,
    st.binary(min_size=1, max_size=300),
)


@given(pools, st.builds(SenderDetails, keys, processes, st.booleans(), st.booleans(), st.booleans()))
def test_handshake_details_survive_the_wire(pool: ReceiverPool, sender: SenderDetails) -> None:
    assert ReceiverPool.decode(pool.encode()) == pool
    assert SenderDetails.decode(sender.encode()) == sender


@pytest.mark.parametrize(
    "pool",
    [
        ReceiverPool(0, 1 << 62, None, None, b"agent"),
        ReceiverPool(0, 1, None, ProcessIdentity(bytes(16), 1, 1 << 31, 1), b""),
    ],
    ids=["no pool", "no process's number"],
)
def test_impossible_numbers_are_a_transfer_error(pool: ReceiverPool) -> None:
    with pytest.raises(TransferError, match="the peer"):
        ReceiverPool.decode(pool.encode())


def test_an_older_sender_loads_nixl() -> None:
    sender = SenderDetails(bytes(16), ProcessIdentity.own(), on_device=False, same_host=True, loads_nixl=True)
    assert SenderDetails.decode(sender.encode()[:-1]) == sender


@given(st.binary(max_size=100))
def test_random_details_are_decoded_or_a_transfer_error(data: bytes) -> None:
    for decode in (ReceiverPool.decode, SenderDetails.decode):
        with contextlib.suppress(TransferError):
            decode(data)


async def test_a_process_that_has_ended_is_gone() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    child = ProcessIdentity.of(process.pid)
    waiting = asyncio.create_task(wait_until_ended(child))
    await asyncio.sleep(0)
    assert not waiting.done()
    process.kill()
    async with asyncio.timeout(DEADLINE_S):
        await waiting
        await process.wait()
        await wait_until_ended(child)


async def test_another_process_with_the_same_id_is_not_waited_for() -> None:
    own = ProcessIdentity.own()
    async with asyncio.timeout(DEADLINE_S):
        await wait_until_ended(ProcessIdentity(own.boot, own.pid_namespace, own.pid, own.started - 1))


async def test_a_key_that_is_not_the_receivers_is_refused_as_stale(network: Real) -> None:
    receiver, sender = await network.open(Pool(4)), await network.open(Pool(4))
    where = Address.decode(receiver.address)
    with pytest.raises(StaleTransferError, match="another transport"):
        await sender.connect(Address(where.host, where.port, bytes(16)).encode())


async def test_nothing_is_written_where_only_somebody_says_so(network: Real) -> None:
    """An impostor at the receiver's address names a process and a pointer, and grants pages there."""
    victim, receiver, source = Pool(8), await network.open(Pool(8)), Pool(8, seed=1)
    where = Address.decode(receiver.address)
    forged = ReceiverPool(victim.memory.pointer, 8, None, ProcessIdentity.own(), b"").encode()
    heard: list[frames.Frame] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = frames.decode(await read_frame(reader))
        heard.append(hello)
        assert isinstance(hello, frames.Hello)
        assert where.key not in frames.encode(hello)
        guess = ReceiverGreeting(bytes(16)).welcome(hello, forged)
        for frame in (guess, frames.Grant(1, (0,))):
            writer.write(frames.encode(frame))
        with contextlib.suppress(asyncio.IncompleteReadError):
            heard.append(frames.decode(await read_frame(reader)))
        writer.close()

    impostor = await asyncio.start_server(pretend, "127.0.0.1", 0)
    address = Address("127.0.0.1", impostor.sockets[0].getsockname()[1], where.key).encode()
    sender = await network.open(source)
    with pytest.raises(TransferError, match="does not prove that it has this address, so nothing is written to it"):
        await sender.connect(address)
    await eventually(lambda: len(heard) == 1)
    impostor.close()
    assert victim.untouched()


async def test_a_recorded_greeting_can_not_be_replayed(network: Real) -> None:
    target = Pool(8)
    receiver = await network.open(target, epoch=1)
    landing = receiver.expect(1, 1, range(8))
    where = Address.decode(receiver.address)
    details = SenderDetails(bytes(16), ProcessIdentity.own(), on_device=False, same_host=True, loads_nixl=True)
    greeting = SenderGreeting(where.key, target.memory.page_bytes, details.encode())
    offer = frames.Offer(1, 1, 1, 1, ((0, 8),))

    async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, frames.Welcome]:
        reader, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(frames.encode(greeting.hello))
        welcome = frames.decode(await read_frame(reader))
        assert isinstance(welcome, frames.Welcome)
        return reader, writer, welcome

    async with asyncio.timeout(DEADLINE_S):
        _, first, welcome = await opened()
        recorded = greeting.answer(welcome)
        reader, second, _ = await opened()
        for frame in (recorded, offer):
            second.write(frames.encode(frame))
        answer = frames.decode(await read_frame(reader))
        assert isinstance(answer, frames.Stop)
        assert "does not prove that it knows this transport's address" in answer.reason
    first.close()
    second.close()
    assert landing.revoke()


async def test_another_protocol_is_refused(network: Real) -> None:
    receiver = await network.open(Pool(4))
    where = Address.decode(receiver.address)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert b"announced" in await reader.read()
    writer.close()


async def test_connections_leave_no_threads_and_no_files_behind(network: Real) -> None:
    receiver, sender = await network.open(Pool(64)), await network.open(Pool(64, seed=1))

    async def once() -> None:
        peer = await sender.connect(receiver.address)
        landing = receiver.expect(1, 1, range(64))
        await peer.push(ticket(receiver, 1, 1, range(64)), [(k, 63 - k) for k in range(64)]).done()
        await landing.done()
        await peer.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    await once()  # NIXL keeps some things for the life of the process
    await eventually(lambda: not any(thread.name.startswith("kvtransfer-nixl") for thread in threading.enumerate()))
    before = held()
    for _ in range(3):
        await once()
    await eventually(lambda: held() <= before)


async def test_a_missing_nixl_is_an_error_that_says_what_to_do_once_it_is_needed(
    network: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "MODULES", ("nixl_of_nobody",))
    receiver, sender = await network.open(Pool(4)), await network.open(Pool(4))
    assert (await sender.connect(receiver.address)).route == "memory"
    distant = await kvtransfer.create("nixl", Pool(4).memory, epoch=1, host="127.0.0.1", same_host=False)
    with pytest.raises(TransferError, match="pip install nixl-cu13"):
        await distant.connect(receiver.address)
    await distant.close()


async def test_auto_takes_nixl_where_it_works_and_says_why() -> None:
    transport = await kvtransfer.create("auto", Pool(4).memory, epoch=1, host="127.0.0.1")
    assert transport.name == "nixl"
    assert transport.reason.startswith("pages go through memory between processes of one machine")
    await transport.close()


async def test_auto_takes_nixl_beside_a_load_of_eight_too() -> None:
    loads = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(8)]
    try:
        transport = await kvtransfer.create("auto", Pool(4).memory, epoch=1, host="127.0.0.1")
    finally:
        for load in loads:
            load.kill()
            await load.wait()
    assert transport.name == "nixl", transport.reason
    await transport.close()


async def test_without_permission_pages_of_one_machine_go_over_the_network(network: Real) -> None:
    def forbidden(*_: object) -> None:
        raise ForbiddenError("not here")

    target, source = Pool(4), Pool(4, seed=1)
    receiver, sender = await network.open(target), await network.open(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SameHostBackend, "_check_permission", forbidden)
        peer = await sender.connect(receiver.address)
    assert peer.route == "network"
    assert (await sender.connect(receiver.address)).route == "memory"  # each process is asked for
    landing = receiver.expect(1, 1, [2])
    async with asyncio.timeout(DEADLINE_S):
        await peer.push(ticket(receiver, 1, 1, [2]), [(3, 0)]).done()
        await landing.done()
    assert (target.pages[2] == source.pages[3]).all()


async def test_a_gpus_pages_and_a_hosts_do_not_mix(network: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    host, gpu = await network.open(Pool(4)), await network.open(Pool(4, device=fake_gpu.DEVICE))
    for sender, receiver in ((host, gpu), (gpu, host)):
        with pytest.raises(TransferError, match="such a pair exchanges no pages"):
            await sender.connect(receiver.address)


async def test_gpus_of_one_machine_exchange_pages_only_within_one_pid_namespace(
    network: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    pools = [Pool(4, device=fake_gpu.DEVICE) for _ in range(2)]
    receiver, sender = [await network.open(pool) for pool in pools]
    assert (await sender.connect(receiver.address)).route == "memory"
    own = ProcessIdentity.own()
    namespaces = iter([own.pid_namespace, own.pid_namespace + 1])
    monkeypatch.setattr(ProcessIdentity, "own", lambda: dataclasses.replace(own, pid_namespace=next(namespaces)))
    with pytest.raises(TransferError, match="hostPID"):
        await sender.connect(receiver.address)


async def test_a_connection_is_closed_when_the_gpu_has_finished_the_agents_copies(
    network: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    receiver, sender = [await network.open(Pool(4, device=fake_gpu.DEVICE)) for _ in range(2)]
    peer = await sender.connect(receiver.address)
    asked, copied = threading.Event(), threading.Event()

    def wait(device: int) -> None:
        assert device == fake_gpu.DEVICE
        asked.set()
        assert copied.wait(DEADLINE_S)

    monkeypatch.setattr(cuda, "wait", wait)
    closing = asyncio.create_task(peer.close())
    assert await asyncio.to_thread(asked.wait, DEADLINE_S)
    assert not closing.done()
    copied.set()
    async with asyncio.timeout(DEADLINE_S):
        await closing


async def test_an_agent_that_cannot_connect_is_destroyed_on_its_thread(
    network: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    receiver, sender = [await network.open(Pool(4, device=fake_gpu.DEVICE)) for _ in range(2)]
    threads: list[str] = []
    close = agent.Agent.close

    def destroy(self: agent.Agent) -> None:
        threads.append(threading.current_thread().name)
        close(self)

    monkeypatch.setattr(agent.Agent, "close", destroy)
    monkeypatch.setattr(agent.Agent, "metadata", lambda self: b"none")
    with pytest.raises(TransferError, match="NIXL failed"):
        await sender.connect(receiver.address)
    assert "kvtransfer-nixl-send" in threads


async def test_an_agent_may_take_its_time_on_either_side(network: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.session.limits.GREETING_S", 0.5)
    real = agent.Agent.__init__

    def slow(self: agent.Agent, *arguments: Any, **named: Any) -> None:
        time.sleep(1.5)
        real(self, *arguments, **named)

    monkeypatch.setattr(agent.Agent, "__init__", slow)
    fake_gpu.install(monkeypatch)
    receiver, sender = [await network.open(Pool(4, device=fake_gpu.DEVICE)) for _ in range(2)]
    async with asyncio.timeout(DEADLINE_S):
        assert (await sender.connect(receiver.address)).alive


async def test_rdma_ports_with_a_link_are_used_beside_the_hosts_interface(
    network: Real, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "")  # so that it is restored
    monkeypatch.delenv("UCX_NET_DEVICES")
    for port, state in (
        ("mlx5_0/ports/1", "4: ACTIVE"),
        ("mlx5_1/ports/1", "1: DOWN"),
        ("mlx5_1/ports/2", "4: ACTIVE"),
    ):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state + "\n")
    monkeypatch.setattr(addresses, "_RDMA", tmp_path)
    assert agent.options("127.0.0.1")["NET_DEVICES"] == "lo"
    assert "NET_DEVICES" not in agent.options("0.0.0.0")
    monkeypatch.setattr(addresses, "interface_of", lambda host: "lo")
    assert agent.options("10.0.0.1")["NET_DEVICES"] == "lo,mlx5_0:1,mlx5_1:2"
    pool = Pool(4)
    agent.Agent(pool.memory, agent.options("10.0.0.1"), progress=False).close()
    assert os.environ["UCX_NET_DEVICES"] == "lo,mlx5_0:1,mlx5_1:2"


async def test_an_interface_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="host"):
        await kvtransfer.create("nixl", Pool(4).memory, epoch=1, host="203.0.113.7")


async def test_an_address_that_never_answers_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, network: Real
) -> None:
    async def never(host: str, port: int) -> None:
        await asyncio.Event().wait()

    sender = await network.open(Pool(4))
    monkeypatch.setattr("kvtransfer.nixl.transport.GREETING_S", 0.01)
    monkeypatch.setattr("kvtransfer.nixl.transport.asyncio.open_connection", never)
    address = Address("127.0.0.1", 1, bytes(16)).encode()
    with pytest.raises(TransferError, match=r"no connection to 127\.0\.0\.1:1: no answer for 0\.01 s; a firewall"):
        await sender.connect(address)

"""Streams over real connections."""

import asyncio
import contextlib
import gc
import socket
import struct
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import uvloop

from cpd.common import stream
from cpd.common.stream import BadMessageError, Stream, StreamError, StreamServer, connect
from cpd.common.tls import Certificate, make_certificate
from cpd.rpc import cpd_pb2 as pb

MOST = 1 << 20
Wire = Stream[pb.RouterMessage]


def hello(name: str) -> pb.RouterMessage:
    return pb.RouterMessage(hello=pb.RouterHello(router_id=name))


CERTIFICATE: Certificate | None = None


@pytest.fixture(params=["tcp", "tls"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with and without TLS."""
    if request.param == "tls":
        monkeypatch.setattr(sys.modules[__name__], "CERTIFICATE", make_certificate())


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Wire, Wire]]:
    """The two ends of a stream."""
    there: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()

    async def handle(wire: Wire) -> None:
        there.set_result(wire)
        await wire.closed()

    server = StreamServer(pb.RouterMessage, MOST, handle)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0, CERTIFICATE)}"
    here = await connect(CERTIFICATE.named_in(address) if CERTIFICATE else address, pb.RouterMessage, MOST)
    try:
        yield here, await asyncio.wait_for(there, 20)
    finally:
        here.abort()
        await server.close()


def streams() -> int:
    """Number of Stream objects that are still referenced."""
    return sum(type(one) is Stream for one in gc.get_objects())  # isinstance disturbs objects of other libraries


async def received(wire: Wire) -> str:
    message = await asyncio.wait_for(wire.receive(), 20)
    return "end" if message is None else message.hello.router_id


@pytest.mark.usefixtures("way")
async def test_messages_of_any_length_come_in_order_and_the_end_after_them() -> None:
    names = ["a", "", "b" * (MOST - 100), "c" * 70_000, "d"]
    async with both() as (here, there):
        for name in names:
            here.send(hello(name))
        here.close()
        assert [await received(there) for _ in range(6)] == [*names, "end"]
        assert await received(there) == "end"


@pytest.mark.usefixtures("way")
async def test_an_empty_message_is_received() -> None:
    async with both() as (here, there):
        here.send(pb.RouterMessage())
        assert await received(there) == ""


async def test_a_message_in_many_reads_is_copied_a_few_times_and_not_at_each_read() -> None:
    read_bytes = 16 << 10
    message = hello("x" * (MOST - 100)).SerializeToString()
    data = len(message).to_bytes(4, "little") + message + message[:3]
    wire = Stream(pb.RouterMessage, MOST)
    allocated = 0
    tracemalloc.start()
    try:
        for start in range(0, len(data), read_bytes):
            read = data[start : start + read_bytes]
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            wire.data_received(read)
            allocated += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        wire.connection_lost(None)
    assert await received(wire) == "x" * (MOST - 100)
    assert allocated < 6 * len(data)


@pytest.mark.usefixtures("way")
async def test_messages_sent_before_a_break_are_received_before_its_error() -> None:
    async with both() as (here, there):
        there.send(hello("a"))
        assert await received(here) == "a"
        there.send(hello("b"))
        await asyncio.sleep(0)  # writes happen at the end of the loop's iteration
        cast(asyncio.Transport, here._transport).pause_reading()
        there.close()
        cast(asyncio.Transport, here._transport).resume_reading()
        assert [await received(here) for _ in range(2)] == ["b", "end"]


@pytest.mark.parametrize(
    ("data", "reason"), [((MOST + 1).to_bytes(4, "little"), "the limit is"), (b"\x02\0\0\0\xff\xff", "not a message")]
)
@pytest.mark.usefixtures("way")
async def test_invalid_data_breaks_the_stream(data: bytes, reason: str) -> None:
    async with both() as (here, there):
        cast(asyncio.Transport, here._transport).write(data)
        with pytest.raises(BadMessageError, match=reason):
            await received(there)


@pytest.mark.usefixtures("way")
async def test_drained_waits_for_a_peer_that_does_not_read() -> None:
    async with both() as (here, there):
        cast(asyncio.Transport, there._transport).pause_reading()
        sent = 0
        while here._drained.is_set():
            here.send(hello("x" * 100_000))
            sent += 1
            await asyncio.sleep(0)
        drained = asyncio.ensure_future(here.drained())
        await asyncio.sleep(0.01)
        assert not drained.done()
        cast(asyncio.Transport, there._transport).resume_reading()
        for _ in range(sent):
            await received(there)
        await asyncio.wait_for(drained, 20)


@pytest.mark.usefixtures("way")
async def test_reading_pauses_while_messages_are_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNREAD_BYTES", 200_000)
    async with both() as (here, there):
        while here._drained.is_set():
            here.send(hello("x" * 50_000))
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert there._unread_bytes < 200_000 + (1 << 20)
        here.close()
        while await received(there) != "end":
            pass


@pytest.mark.usefixtures("way")
async def test_a_silent_peer_is_lost_and_an_idle_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.05)
    async with both() as (here, there):
        await asyncio.sleep(0.5)
        here.send(hello("still here"))
        assert await received(there) == "still here"
        here._ticker.cancel()
        with pytest.raises(StreamError, match="it sent nothing"):
            await received(there)


@pytest.mark.usefixtures("way")
async def test_connecting_to_an_unused_address_fails() -> None:
    async with both() as (here, _):
        host, port = cast(asyncio.Transport, here._transport).get_extra_info("peername")
    with pytest.raises(OSError, match="onnect"):
        await connect(f"{host}:{port}", pb.RouterMessage, MOST)


@pytest.mark.usefixtures("way")
async def test_finish_lets_a_peer_that_still_sends_read_everything() -> None:
    async with both() as (here, there):
        for number in range(1000):
            there.send(hello(str(number)))
        there.finish()
        there.send(hello("nothing more"))
        for _ in range(5):
            here.send(hello("still here"))
            await asyncio.sleep(0.005)
        assert [await received(here) for _ in range(1001)] == [*map(str, range(1000)), "end"]
        await asyncio.wait_for(there.closed(), 20)


async def test_finish_closes_after_a_reset_by_the_peer() -> None:
    there: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()

    async def handle(wire: Wire) -> None:
        there.set_result(wire)
        await wire.closed()

    server = StreamServer(pb.RouterMessage, MOST, handle)
    with socket.create_connection(("127.0.0.1", await server.start("127.0.0.1", 0))) as client:
        wire = await asyncio.wait_for(there, 20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.finish()
    await asyncio.wait_for(wire.closed(), 20)
    await server.close()


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_made_while_the_server_closes_is_closed(turns: int) -> None:
    server = StreamServer(pb.RouterMessage, MOST, Stream.closed)
    with socket.create_connection(("127.0.0.1", await server.start("127.0.0.1", 0))) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(20):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


@pytest.mark.parametrize("cancelled", [False, True], ids=["refused", "cancelled"])
def test_a_failed_or_cancelled_connect_leaks_no_stream(cancelled: bool) -> None:
    before = streams()

    async def try_it() -> None:
        server = StreamServer(pb.RouterMessage, MOST, Stream.closed)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        if not cancelled:
            await server.close()
        await connect_and_cancel(address)
        await server.close()
        async with asyncio.timeout(10):
            while streams() > before:
                await asyncio.sleep(0.01)
                gc.collect()

    uvloop.run(try_it())


async def connect_and_cancel(address: str) -> None:
    """Connects, and is cancelled at the moment when the connection is made."""
    made = Stream.connection_made
    connecting = asyncio.ensure_future(connect(address, pb.RouterMessage, MOST))

    def give_up(wire: Wire, transport: asyncio.BaseTransport) -> None:
        made(wire, transport)
        connecting.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "connection_made", give_up)
        with pytest.raises((asyncio.CancelledError, ConnectionRefusedError)):
            await connecting

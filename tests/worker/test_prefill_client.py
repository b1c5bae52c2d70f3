import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import worker.prefill_client
from cpd.common import stream
from cpd.common.stream import Stream, StreamServer
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, HandshakeError, answer_as
from cpd.rpc import cpd_pb2 as pb
from tests.newer import unknown_kind
from tests.waiting import eventually
from worker.prefill_client import PrefillClient, StreamEnded

SECRET = ClusterSecret("secret")
START = pb.PrefillRequest(start=pb.PrefillStart(request=7))
RELEASED = pb.PrefillEvent(released=pb.PrefillReleased())
READY = pb.PrefillEvent(ready=pb.PrefillReady())

Event = pb.PrefillEvent | StreamEnded


class Worker:
    """The other worker. Accepts clients with the right secret, and sends nothing else by itself."""

    def __init__(self) -> None:
        self.streams: list[Stream[pb.RouterMessage]] = []
        self.requests: list[pb.PrefillRequest] = []
        self.address = ""

    def send(self, event: pb.PrefillEvent, stream: int = -1) -> None:
        self.streams[stream].send(pb.WorkerMessage(prefill=event))

    async def serve(self, stream: Stream[pb.RouterMessage]) -> None:
        try:
            assert await answer_as("there", stream, SECRET) == Caller("worker", "here")
        except HandshakeError as error:
            stream.send(pb.WorkerMessage(end=pb.End(reason=str(error))))
            return
        stream.send(pb.WorkerMessage(hello=pb.Hello()))
        self.streams.append(stream)
        while (message := await stream.receive()) is not None:
            self.requests.append(message.prefill)
        self.streams.remove(stream)


@asynccontextmanager
async def connected(secret: ClusterSecret = SECRET) -> AsyncIterator[tuple[PrefillClient, Worker]]:
    there, client = Worker(), PrefillClient("here", secret)
    server = StreamServer(pb.RouterMessage, 4096, there.serve)
    there.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        yield client, there
    finally:
        await client.close()
        await server.close()


async def request(client: PrefillClient, there: Worker) -> None:
    """Makes a request that ends normally."""
    events: list[Event] = []
    known = len(there.requests)
    with client.request("there", there.address, events.append) as send:
        send(START)
        await eventually(lambda: len(there.requests) > known)
        there.send(RELEASED)
        await eventually(lambda: bool(events))
    assert events == [RELEASED]


async def test_a_stream_is_reused_for_the_next_request() -> None:
    async with connected() as (client, there):
        for _ in range(3):
            await request(client, there)
        assert len(there.streams) == 1
        assert there.requests == [START] * 3


async def test_an_idle_stream_keeps_no_message_in_memory() -> None:
    async with connected() as (client, there):
        await request(client, there)
        (idle,) = client._streams
        its_own = gc.get_referents(idle)
        lists = [one for one in its_own if isinstance(one, list)]
        kept = [one for one in [*its_own, *gc.get_referents(*lists)] if isinstance(one, pb.RouterMessage)]
        assert kept == []


async def test_the_stream_of_a_silent_worker_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.05)
    monkeypatch.setattr(stream, "LOST_TICKS", 1_000_000)
    async with connected() as (client, there):
        await request(client, there)
        (kept,) = client._streams
        there.streams[0]._ticker.cancel()
        await eventually(lambda: not kept.reusable)
        await request(client, there)
        assert len(there.streams) == 2


async def test_events_of_unknown_kinds_are_ignored() -> None:
    async with connected() as (client, there):
        events: list[Event] = []
        with client.request("there", there.address, events.append) as send:
            send(START)
            await eventually(lambda: bool(there.requests))
            there.streams[0].send(unknown_kind(pb.WorkerMessage))
            there.send(unknown_kind(pb.PrefillEvent))
            there.send(RELEASED)
            await eventually(lambda: bool(events))
        assert events == [RELEASED]


async def test_concurrent_requests_have_a_stream_each() -> None:
    async with connected() as (client, there):
        first: list[Event] = []
        second: list[Event] = []
        with (
            client.request("there", there.address, first.append) as send,
            client.request("there", there.address, second.append) as other,
        ):
            send(START)
            await eventually(lambda: len(there.requests) == 1)
            there.send(READY, 0)
            other(START)
            await eventually(lambda: len(there.requests) == 2)
            there.send(RELEASED, 1)
            await eventually(lambda: bool(first and second))
        assert first == [READY]
        assert second == [RELEASED]
        await eventually(lambda: len(there.streams) == 1)  # the first request had not ended


@pytest.mark.parametrize("began", [False, True])
async def test_cancelling_a_request_closes_its_stream(began: bool) -> None:
    async with connected() as (client, there):
        with client.request("there", there.address, lambda event: None) as send:
            send(START)
            if began:
                await eventually(lambda: bool(there.requests))
        await eventually(lambda: not there.streams)
        await request(client, there)


async def test_the_end_of_a_stream_is_reported_once_and_only_to_its_request() -> None:
    async with connected() as (client, there):
        await request(client, there)
        there.streams[0].abort()  # while no request uses it
        await eventually(lambda: not client._streams)
        events: list[Event] = []
        known = len(there.requests)
        with client.request("there", there.address, events.append) as send:
            send(START)
            await eventually(lambda: len(there.requests) > known)  # to close with something unread breaks a connection
            there.streams[0].close()
            await eventually(lambda: bool(events))
        assert events == [StreamEnded("the worker ended the request early")]


def _nobody(there: Worker) -> str:
    return "127.0.0.1:1"


def _there(there: Worker) -> str:
    return there.address


@pytest.mark.parametrize(
    ("address", "token", "reason"),
    [
        (_nobody, "secret", "can't be reached"),
        (_there, "guess", "worker there does not prove the cluster's secret"),
        (_there, "", "worker here does not prove the cluster's secret"),
    ],
)
async def test_the_reason_of_a_refused_stream_is_reported(
    address: Callable[[Worker], str], token: str, reason: str
) -> None:
    async with connected(ClusterSecret(token)) as (client, there):
        events: list[Event] = []
        with client.request("there", address(there), events.append) as send:
            send(START)
            await eventually(lambda: bool(events))
        (event,) = events
        assert isinstance(event, StreamEnded)
        assert reason in event.reason
        assert not there.requests


async def test_the_longest_idle_streams_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.prefill_client, "MAX_IDLE", 2)
    async with connected() as (client, there):
        at_once = [asyncio.Event() for _ in range(4)]

        async def one(number: int) -> None:
            events: list[Event] = []
            with client.request("there", there.address, events.append) as send:
                send(START)
                await at_once[number].wait()
                there.send(RELEASED, number)
                await eventually(lambda: bool(events))

        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(one(number)))
            await eventually(lambda: len(there.requests) == len(tasks))
        streams = list(there.streams)
        monkeypatch.setattr(there, "streams", streams)
        for number in range(4):
            at_once[number].set()
            await tasks[number]
        await eventually(lambda: len(client._streams) == 2)

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import worker.channels
from cpd.common import stream
from cpd.common.stream import Stream, StreamServer
from cpd.rpc import cpd_pb2 as pb
from tests.waiting import eventually
from worker.channels import Channels, StreamEnded

HELLO = pb.RouterHello(worker_id="here", token="secret")
START = pb.FillRequest(start=pb.FillStart(request=7))
RELEASED = pb.FillEvent(released=pb.FillReleased())
READY = pb.FillEvent(ready=pb.FillReady())

Event = pb.FillEvent | StreamEnded


class Worker:
    """The other worker: greets those who know the token, and then answers nothing by itself."""

    def __init__(self) -> None:
        self.streams: list[Stream[pb.RouterMessage]] = []
        self.requests: list[pb.FillRequest] = []
        self.address = ""

    def send(self, event: pb.FillEvent, stream: int = -1) -> None:
        self.streams[stream].send(pb.WorkerMessage(fill=event))

    async def serve(self, stream: Stream[pb.RouterMessage]) -> None:
        first = await stream.receive()
        if first is None or first.hello != HELLO:
            stream.send(pb.WorkerMessage(end=pb.End(reason="who are you")))
            return
        stream.send(pb.WorkerMessage(hello=pb.Hello()))
        self.streams.append(stream)
        while (message := await stream.receive()) is not None:
            self.requests.append(message.fill)
        self.streams.remove(stream)


@asynccontextmanager
async def connected(hello: pb.RouterHello = HELLO) -> AsyncIterator[tuple[Channels, Worker]]:
    there, channels = Worker(), Channels(hello)
    server = StreamServer(pb.RouterMessage, 4096, there.serve)
    there.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        yield channels, there
    finally:
        await channels.close()
        await server.close()


async def fill(channels: Channels, there: Worker) -> None:
    """One that ends in order."""
    events: list[Event] = []
    known = len(there.requests)
    with channels.fill(there.address, events.append) as send:
        send(START)
        await eventually(lambda: len(there.requests) > known)
        there.send(RELEASED)
        await eventually(lambda: bool(events))
    assert events == [RELEASED]


async def test_a_stream_is_used_for_one_fill_after_the_other() -> None:
    async with connected() as (channels, there):
        for _ in range(3):
            await fill(channels, there)
        assert len(there.streams) == 1
        assert there.requests == [START] * 3


async def test_an_idle_stream_keeps_no_message_alive() -> None:
    async with connected() as (channels, there):
        await fill(channels, there)
        (idle,) = channels._channels
        its_own = gc.get_referents(idle)
        lists = [one for one in its_own if isinstance(one, list)]
        kept = [one for one in [*its_own, *gc.get_referents(*lists)] if isinstance(one, pb.RouterMessage)]
        assert kept == []


async def test_no_fill_gets_the_stream_of_a_worker_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.05)
    monkeypatch.setattr(stream, "LOST_TICKS", 1_000_000)
    async with connected() as (channels, there):
        await fill(channels, there)
        (kept,) = channels._channels
        there.streams[0]._ticker.cancel()
        await eventually(lambda: not kept.reusable)
        await fill(channels, there)
        assert len(there.streams) == 2


async def test_fills_at_a_time_have_a_stream_each() -> None:
    async with connected() as (channels, there):
        first: list[Event] = []
        second: list[Event] = []
        with channels.fill(there.address, first.append) as send, channels.fill(there.address, second.append) as other:
            send(START)
            await eventually(lambda: len(there.requests) == 1)
            there.send(READY, 0)
            other(START)
            await eventually(lambda: len(there.requests) == 2)
            there.send(RELEASED, 1)
            await eventually(lambda: bool(first and second))
        assert first == [READY]
        assert second == [RELEASED]
        await eventually(lambda: len(there.streams) == 1)  # the first one had not ended


@pytest.mark.parametrize("began", [False, True])
async def test_who_gives_a_fill_up_closes_its_stream(began: bool) -> None:
    async with connected() as (channels, there):
        with channels.fill(there.address, lambda event: None) as send:
            send(START)
            if began:
                await eventually(lambda: bool(there.requests))
        await eventually(lambda: not there.streams)
        await fill(channels, there)


async def test_what_ends_a_stream_is_told_once_nobody_else() -> None:
    async with connected() as (channels, there):
        await fill(channels, there)
        there.streams[0].abort()  # while nobody uses it
        await eventually(lambda: not channels._channels)
        events: list[Event] = []
        with channels.fill(there.address, events.append) as send:
            send(START)
            await eventually(lambda: bool(there.streams))
            there.streams[0].close()
            await eventually(lambda: bool(events))
        assert events == [StreamEnded("the worker ended the fill early")]


def _nobody(there: Worker) -> str:
    return "127.0.0.1:1"


def _there(there: Worker) -> str:
    return there.address


@pytest.mark.parametrize(
    ("address", "token", "reason"), [(_nobody, "secret", "can't be reached"), (_there, "guess", "who are you")]
)
async def test_why_a_worker_takes_no_fill_is_told(address: Callable[[Worker], str], token: str, reason: str) -> None:
    async with connected(pb.RouterHello(worker_id="here", token=token)) as (channels, there):
        events: list[Event] = []
        with channels.fill(address(there), events.append) as send:
            send(START)
            await eventually(lambda: bool(events))
        (event,) = events
        assert isinstance(event, StreamEnded)
        assert reason in event.reason
        assert not there.requests


async def test_the_longest_idle_streams_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.channels, "MAX_IDLE", 2)
    async with connected() as (channels, there):
        at_once = [asyncio.Event() for _ in range(4)]

        async def one(number: int) -> None:
            events: list[Event] = []
            with channels.fill(there.address, events.append) as send:
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
        await eventually(lambda: len(channels._channels) == 2)

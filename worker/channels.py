"""Streams to other workers, for fills.

A stream carries one fill at a time. It is kept for the next one when a fill has ended in order, with FillReleased or
FillRefused; otherwise it is closed, which tells the other worker that nobody wants the fill any more. While the other
worker is silent no fill gets a kept stream.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from cpd.common.errors import CPDError
from cpd.common.stream import Stream, StreamError, connect
from cpd.rpc import cpd_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of a million tokens with its hashes is about 4 MiB."""

MAX_IDLE = 64

OnEvent = Callable[["pb.FillEvent | StreamEnded"], None]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Nothing more comes of a fill."""

    reason: str


class RefusedError(CPDError):
    """The other worker takes no fills from this one."""


class Channel:
    """A stream to one worker. Made by `Channels`.

    Attributes:
        address: The worker's.
        on_event: Who hears of the fill; None where nobody does.
        task: Ends with the stream.
    """

    def __init__(self, address: str, hello: pb.RouterHello) -> None:
        self.address = address
        self.on_event: OnEvent | None = None
        self._unsent = [pb.RouterMessage(hello=hello)]
        self._wire: Stream[pb.WorkerMessage] | None = None
        self._ended = False
        self.task = asyncio.create_task(self._run(), name=f"fills-{address}")

    @property
    def reusable(self) -> bool:
        """The last fill has ended in order, and the worker is heard."""
        return self._ended and not self.task.done() and self._wire is not None and not self._wire.silent

    def send(self, request: pb.FillRequest) -> None:
        """Sends a message, as soon as the worker takes some."""
        self._ended = False
        message = pb.RouterMessage(fill=request)
        if self._wire is None:
            self._unsent.append(message)
        else:
            self._wire.send(message)

    def close(self) -> None:
        """Closes the stream: nobody wants the fill any more."""
        self.task.cancel()

    async def _run(self) -> None:
        reason = "the worker ended the fill early"
        try:
            wire = await connect(self.address, pb.WorkerMessage, MAX_MESSAGE_BYTES)
            try:
                await self._greet(wire)
                while (message := await wire.receive()) is not None:
                    self._take(message.fill)
            finally:
                wire.abort()
        except OSError as error:
            reason = f"it can't be reached: {error.strerror or error}"
        except (RefusedError, StreamError) as error:
            reason = str(error)
        if self.on_event is not None:
            self.on_event(StreamEnded(reason))

    async def _greet(self, wire: Stream[pb.WorkerMessage]) -> None:
        """Until it is answered a worker reads no more than a Hello."""
        wire.send(self._unsent[0])
        answer = await wire.receive()
        if answer is None or answer.WhichOneof("kind") != "hello":
            raise RefusedError(answer.end.reason if answer is not None else "it closed the stream")
        for request in self._unsent[1:]:
            wire.send(request)
        self._unsent.clear()
        self._wire = wire

    def _take(self, event: pb.FillEvent) -> None:
        if event.WhichOneof("kind") in ("released", "refused"):
            self._ended = True
        if self.on_event is not None:
            self.on_event(event)


class Channels:
    """The streams of one worker to others; the longest idle ones are closed when there are many.

    Args:
        hello: Says who calls.
    """

    def __init__(self, hello: pb.RouterHello) -> None:
        self._hello = hello
        self._channels: set[Channel] = set()
        self._idle: list[Channel] = []  # the longest idle one first

    @contextlib.contextmanager
    def fill(self, address: str, on_event: OnEvent) -> Iterator[Callable[[pb.FillRequest], None]]:
        """A fill by the worker at `address`; yields what sends it a message without waiting.

        The end of the context cancels the fill where it is still going on.
        """
        channel = next((one for one in reversed(self._idle) if one.address == address and one.reusable), None)
        if channel is None:
            channel = Channel(address, self._hello)
            self._channels.add(channel)
            channel.task.add_done_callback(partial(self._closed, channel))
        else:
            self._idle.remove(channel)
        channel.on_event = on_event
        try:
            yield channel.send
        finally:
            channel.on_event = None
            if channel.reusable:
                self._idle.append(channel)
            else:
                channel.close()
            if len(self._idle) > MAX_IDLE:
                self._idle.pop(0).close()

    async def close(self) -> None:
        """Closes every stream."""
        for channel in self._channels:
            channel.close()
        await asyncio.gather(*(channel.task for channel in self._channels), return_exceptions=True)

    def _closed(self, channel: Channel, task: asyncio.Task[None]) -> None:
        self._channels.discard(channel)
        if channel in self._idle:
            self._idle.remove(channel)

"""Sends prefill requests to other workers, over streams that are reused.

A stream carries one prefill request at a time. It is kept for the next one if a request ended in order, with
PrefillReleased or PrefillRefused; otherwise it is closed, which cancels the request. A kept stream is not reused while
the other worker is silent.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from cpd.common.stream import MAX_MESSAGE_BYTES, Stream, StreamError, connect
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, HandshakeError, open_as
from cpd.protocol.version import UnknownMessages
from cpd.rpc import cpd_pb2 as pb

MAX_IDLE = 64

OnEvent = Callable[["pb.PrefillEvent | StreamEnded"], None]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """No more events of this request will come."""

    reason: str


class _PrefillStream:
    """A stream to one worker.

    Attributes:
        worker_id: The worker's name.
        address: Its address.
        on_event: Receives the current request's events; None between requests.
        task: Ends with the stream.
    """

    def __init__(self, caller: Caller, worker_id: str, address: str, secret: ClusterSecret) -> None:
        self.worker_id, self.address = worker_id, address
        self.on_event: OnEvent | None = None
        self._caller = caller
        self._secret = secret
        self._unsent: list[pb.RouterMessage] = []
        self._stream: Stream[pb.WorkerMessage] | None = None
        self._ended = False
        self.task = asyncio.create_task(self._run(), name=f"prefill-requests-{address}")

    @property
    def reusable(self) -> bool:
        """True if the last request has ended in order and the worker is not silent."""
        return self._ended and not self.task.done() and self._stream is not None and not self._stream.silent

    def send(self, request: pb.PrefillRequest) -> None:
        """Sends a message, as soon as the stream is open."""
        self._ended = False
        message = pb.RouterMessage(prefill=request)
        if self._stream is None:
            self._unsent.append(message)
        else:
            self._stream.send(message)

    def close(self) -> None:
        """Closes the stream, which cancels the request."""
        self.task.cancel()

    async def _run(self) -> None:
        reason = "the worker ended the request early"
        try:
            stream = await connect(self.address, pb.WorkerMessage, MAX_MESSAGE_BYTES)
            try:
                await self._greet(stream)
                unknown = UnknownMessages(f"worker {self.worker_id}")
                while (message := await stream.receive()) is not None:
                    if message.prefill.WhichOneof("kind") is None:
                        unknown.ignore()
                    else:
                        self._take(message.prefill)
            finally:
                stream.abort()
        except OSError as error:
            reason = f"it can't be reached: {error.strerror or error}"
        except (HandshakeError, StreamError) as error:
            reason = str(error)
        if self.on_event is not None:
            self.on_event(StreamEnded(reason))

    async def _greet(self, stream: Stream[pb.WorkerMessage]) -> None:
        """Opens the stream, then sends what has waited: before its Hello a worker reads only short messages."""
        await open_as(self._caller, stream, self.worker_id, self._secret)
        answer = await stream.receive()
        if answer is None or answer.WhichOneof("kind") != "hello":
            raise HandshakeError(answer.end.reason if answer is not None else "it closed the stream")
        for request in self._unsent:
            stream.send(request)
        self._unsent.clear()
        self._stream = stream

    def _take(self, event: pb.PrefillEvent) -> None:
        if event.WhichOneof("kind") in ("released", "refused"):
            self._ended = True
        if self.on_event is not None:
            self.on_event(event)


class PrefillClient:
    """The streams of one worker to others. Above `MAX_IDLE` idle streams, the longest idle ones are closed.

    Args:
        worker_id: This worker's name.
        secret: The cluster's secret.
    """

    def __init__(self, worker_id: str, secret: ClusterSecret) -> None:
        self._caller = Caller("worker", worker_id)
        self._secret = secret
        self._streams: set[_PrefillStream] = set()
        self._idle: list[_PrefillStream] = []  # the longest idle one first

    @contextlib.contextmanager
    def request(self, worker_id: str, address: str, on_event: OnEvent) -> Iterator[Callable[[pb.PrefillRequest], None]]:
        """Opens a prefill request to the worker `worker_id` at `address`; yields a function that sends it a message.

        Leaving the context cancels the request if it has not ended.
        """
        worker = (worker_id, address)
        stream = next(
            (one for one in reversed(self._idle) if (one.worker_id, one.address) == worker and one.reusable), None
        )
        if stream is None:
            stream = _PrefillStream(self._caller, worker_id, address, self._secret)
            self._streams.add(stream)
            stream.task.add_done_callback(partial(self._closed, stream))
        else:
            self._idle.remove(stream)
        stream.on_event = on_event
        try:
            yield stream.send
        finally:
            stream.on_event = None
            if stream.reusable:
                self._idle.append(stream)
            else:
                stream.close()
            if len(self._idle) > MAX_IDLE:
                self._idle.pop(0).close()

    async def close(self) -> None:
        """Closes every stream."""
        for stream in self._streams:
            stream.close()
        await asyncio.gather(*(stream.task for stream in self._streams), return_exceptions=True)

    def _closed(self, stream: _PrefillStream, task: asyncio.Task[None]) -> None:
        self._streams.discard(stream)
        if stream in self._idle:
            self._idle.remove(stream)

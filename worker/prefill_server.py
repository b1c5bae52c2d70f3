"""Serves the prefill requests of other workers, which want KV pages in their pools.

A stream carries one request after the other. Each ends with PrefillReleased or PrefillRefused, once nothing of it is in
flight. `ServedPrefill.stop` (cancel, broken stream, failed transfer) leads there from any state; the task that runs a
request is never cancelled.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cpd.common.errors import CPDError
from cpd.common.stream import Stream, StreamError
from cpd.protocol.version import UnknownMessages
from cpd.residency.snapshot import ModelState
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer
from worker.async_engine import EngineDiedError
from worker.context import WorkerContext
from worker.page_sender import PageSender, SourcePool
from worker.wire_format import InvalidRequestError

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 1.0

IncomingStream = Stream[pb.RouterMessage]
Send = Callable[[pb.PrefillEvent], None]


class PrefillStoppedError(CPDError):
    """The request must end early."""


class ServedPrefill(ABC):
    """One prefill request, as the worker that computes or caches the pages sees it.

    Args:
        name: Used in logs.
        start: The caller's first message.
        send: Sends the caller an event.
        source: This worker's pages.

    Attributes:
        landing: Set to the caller's answer to PrefillReady.
        outcome: completed, failed or cancelled; empty until the request has ended.
        trace: Its span; None if the request is not traced.
    """

    def __init__(self, name: str, start: pb.PrefillStart, send: Send, source: SourcePool) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.landing: asyncio.Future[pb.PrefillLanding] = loop.create_future()
        self.outcome = ""
        self.trace: TracedSpan | None = None
        self._send = send
        self._stopped: asyncio.Future[str] = loop.create_future()
        self._cancelled = False
        self._caller = start.decode_worker_id
        self._address = start.transport_address
        self._checksums = start.checksums
        self._source = source
        self._completed_before = 0
        self._landed_at = 0.0

    async def run(self) -> bool:
        """Runs the request to its end; returns whether a last event was sent.

        After an unexpected error there is none: the stream just ends.
        """
        last = None
        try:
            last = await self._run()
        except EngineDiedError:
            self.outcome = "failed"
        except Exception:
            log.exception("prefill request %s failed unexpectedly", self.name)
            self.outcome = "failed"
            self.stop("it failed unexpectedly")
            self._clear_up()
        finally:
            self._ended()
        if last is not None:
            self._send(last)
        if self.trace is not None:
            self.trace.end(time.monotonic(), "" if self.outcome == "completed" else self.outcome)
        self._send = _drop  # the stream may carry another request from now on
        return last is not None

    def stop(self, reason: str, *, cancelled: bool = False) -> None:
        """Ends the request early; the first reason counts."""
        if not self._stopped.done():
            self._cancelled = cancelled
            self._stopped.set_result(reason)

    def heartbeat(self, *, engine_works: bool) -> None:
        """Sends Progress if the engine works on, or pages have moved; otherwise Alive: this process still runs."""
        completed = self._source.completed_transfers
        moved, self._completed_before = completed != self._completed_before, completed
        if engine_works and (moved or not self._only_sends):
            self._send_progress()
        else:
            self._send(pb.PrefillEvent(alive=pb.PrefillAlive()))

    # ---- for subclasses ----

    @abstractmethod
    async def _run(self) -> pb.PrefillEvent:
        """Returns the last event when nothing is in flight."""

    @abstractmethod
    def _clear_up(self) -> None:
        """Removes the request from the engine after an unexpected error."""

    @abstractmethod
    def _ended(self) -> None:
        """Called when the request has ended."""

    @property
    @abstractmethod
    def _only_sends(self) -> bool:
        """True while the request needs only the transport."""

    def _send_progress(self) -> None:
        self._send(pb.PrefillEvent(progress=pb.PrefillProgress()))

    async def _unless_stopped(self, future: asyncio.Future[T]) -> T:
        """Waits for `future`. Raises PrefillStoppedError if the request is stopped first."""
        if not future.done():
            waiting: list[asyncio.Future[Any]] = [future, self._stopped]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise PrefillStoppedError(self._stopped.result())
        return future.result()

    def _sender(self, peer: Peer, landing: pb.PrefillLanding, blocks: int) -> PageSender:
        """Returns a sender into `landing`. Raises InvalidRequestError if it does not end with block `blocks`."""
        self._landed_at = time.monotonic()
        return PageSender(
            peer,
            landing,
            blocks,
            source=self._source,
            checksums=self._checksums,
            announce=lambda pages: self._send(pb.PrefillEvent(pages=pages)),
            failed=self.stop,
        )

    async def _finish(self, sender: PageSender, error: str = "") -> pb.PrefillEvent:
        """Waits until all pages have arrived; with an `error`, cancels them. Returns the last event."""
        in_flight = asyncio.ensure_future(sender.done())
        if not error:
            try:
                await self._unless_stopped(in_flight)
            except PrefillStoppedError as stopped:
                error = str(stopped)
        if error:
            sender.cancel()
        await in_flight
        if self.trace is not None:
            moved = {"cpd.pages": sender.pages_sent}
            self.trace.child("transfer", self._landed_at, attributes=moved).end(time.monotonic(), error)
        return self._release(sender.pages_sent, error)

    def _release(self, pages_sent: int, error: str) -> pb.PrefillEvent:
        self.outcome = "cancelled" if error and self._cancelled else "failed" if error else "completed"
        return pb.PrefillEvent(released=pb.PrefillReleased(pages=pages_sent, error=error))

    def _refuse(self, message: str, *, queue_full: bool = False) -> pb.PrefillEvent:
        self.outcome = "failed"
        return _refusal(message, queue_full=queue_full)


class PrefillServer:
    """Serves prefill requests.

    Args:
        make: Makes a request that this worker can serve, or raises InvalidRequestError.
        on_end: Called when a request has ended.
    """

    def __init__(
        self,
        context: WorkerContext,
        make: Callable[[pb.PrefillStart, Send], ServedPrefill],
        on_end: Callable[[ServedPrefill], None],
    ) -> None:
        self._context = context
        self._make = make
        self._on_end = on_end
        self._running: dict[ServedPrefill, asyncio.Task[bool]] = {}
        self._streams: set[IncomingStream] = set()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="prefill-heartbeats")

    @property
    def running(self) -> Collection[ServedPrefill]:
        """The requests that have not ended."""
        return self._running.keys()

    async def serve(self, stream: IncomingStream) -> None:
        """Serves one stream. A request outlives it until nothing is in flight."""
        prefill: ServedPrefill | None = None
        unknown = UnknownMessages("a worker")
        self._streams.add(stream)
        try:
            while (message := await stream.receive()) is not None:
                request = message.prefill
                match request.WhichOneof("kind"):
                    case "start" if prefill is None or prefill.outcome:
                        prefill = self._begin(request.start, stream)
                    case "cancel" if prefill is None:
                        pass  # it has crossed the refusal
                    case None if message.WhichOneof("kind") in ("prefill", None):
                        unknown.ignore()
                    case _ if prefill is None:
                        log.warning("a worker's first message was not PrefillStart")
                        return
                    case "landing" if not prefill.landing.done():
                        prefill.landing.set_result(request.landing)
                    case "cancel":
                        prefill.stop("cancelled", cancelled=True)
                    case other:
                        prefill.stop(f"unexpected message {other!r} in a prefill request")
        except StreamError as error:
            log.debug("a stream of prefill requests: %s", error)
        finally:
            self._streams.discard(stream)
            if prefill is not None:
                prefill.stop("the decode worker is gone", cancelled=True)

    async def end_all(self, reason: str) -> None:
        """Ends every request and waits until nothing is in flight."""
        for prefill in self._running:
            prefill.stop(reason)
        await asyncio.gather(*self._running.values())

    async def stop(self) -> None:
        """Ends every request and stream, and waits until nothing is in flight."""
        self._heartbeats.cancel()
        await self.end_all("the worker stops")
        for stream in self._streams:
            stream.finish()

    def _begin(self, start: pb.PrefillStart, stream: IncomingStream) -> ServedPrefill | None:
        """Starts a request, or refuses it and returns None."""

        def send(event: pb.PrefillEvent) -> None:
            stream.send(pb.WorkerMessage(prefill=event))

        try:
            prefill = self._accept(start, send)
        except InvalidRequestError as error:
            send(_refusal(str(error)))
            return None
        task = asyncio.create_task(prefill.run(), name=prefill.name)
        self._running[prefill] = task
        task.add_done_callback(partial(self._ended, prefill, stream))
        self._context.load_changed()
        return prefill

    def _accept(self, start: pb.PrefillStart, send: Send) -> ServedPrefill:
        context = self._context
        # requests that move away from this worker fetch their blocks from it
        if context.lifecycle.draining.is_set() and not start.cache_only:
            raise InvalidRequestError("this worker drains")
        self._check_model(start)
        if start.fingerprint != context.fingerprint:
            raise InvalidRequestError(
                f"workers {start.decode_worker_id} and {context.worker_id} differ in weights, dtype or block size: "
                "their pages cannot be exchanged"
            )
        if start.transport != context.transport.name:
            start.transport_address = start.common_address
        if not start.transport_address:
            raise InvalidRequestError(
                f"worker {start.decode_worker_id} moves pages over {start.transport}, {context.worker_id} over "
                f"{context.transport.name}, and they have no way in common"
            )
        prefill = self._make(start, send)
        if start.traceparent and context.tracing is not None:
            about = {"cpd.decode_worker": start.decode_worker_id}
            name, parent = "prefix" if start.cache_only else "prefill", {"traceparent": start.traceparent}
            prefill.trace = context.tracing.begin(name, time.monotonic(), parent, about)
        return prefill

    def _check_model(self, start: pb.PrefillStart) -> None:
        """Raises InvalidRequestError if the model does not serve this request. Draining, it still sends what it has."""
        model = self._context.model
        if start.cache_only:
            if not model.state.has_memory:
                raise InvalidRequestError("this worker's model sleeps")
            return
        model.request_arrived()
        if model.state is not ModelState.SERVING:
            model.prefill_refused()
            raise InvalidRequestError("this worker's model sleeps, or is about to")

    def _ended(self, prefill: ServedPrefill, stream: IncomingStream, task: asyncio.Task[bool]) -> None:
        if not task.result():
            stream.abort()
        del self._running[prefill]
        self._on_end(prefill)
        self._context.load_changed()

    async def _send_heartbeats(self) -> None:
        """Sends every request a heartbeat each second.

        The engine works if it has answered a call since the last heartbeat, or made progress within its step.
        """
        context = self._context
        answer: asyncio.Future[None] | None = None
        progress = context.progress()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            before, progress = progress, context.progress()
            answered = answer is not None and answer.done() and answer.exception() is None
            works = answered or progress != before
            for prefill in list(self._running):
                prefill.heartbeat(engine_works=works)
            if answer is None or answer.done():
                answer = context.engine.call(lambda engine: None) if self._running else None


def _drop(event: pb.PrefillEvent) -> None:
    """Sends nothing."""


def _refusal(message: str, *, queue_full: bool = False) -> pb.PrefillEvent:
    """Returns the last event of a request for which nothing was sent."""
    return pb.PrefillEvent(refused=pb.PrefillRefused(message=message, queue_full=queue_full))

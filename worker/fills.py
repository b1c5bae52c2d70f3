"""The fills that this worker serves: decode workers want pages in their pools, on streams of one fill after the other.

Every fill ends with FillReleased or FillRefused, when nothing of it is in flight any more. `ServedFill.stop` (cancel,
broken stream, failed transfer) leads there from any state; the task that runs a fill is never cancelled.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from cpd.common.errors import CPDError
from cpd.common.stream import Stream, StreamError
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer
from worker.convert import InvalidRequestError
from worker.delivery import Delivery, Outlet
from worker.engine_bridge import EngineDiedError
from worker.node import Node

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 1.0

Wire = Stream[pb.RouterMessage]
Send = Callable[[pb.FillEvent], None]


class FillStoppedError(CPDError):
    """The fill is to end early."""


class ServedFill(ABC):
    """One fill, as the worker that has or makes the pages sees it.

    Args:
        name: For logs.
        start: What the caller sent.
        send: Sends the caller an event.
        outlet: By which pages leave.

    Attributes:
        landing: To be resolved with the caller's answer to FillReady.
        outcome: How it ended, once it has: completed, failed or cancelled.
    """

    def __init__(self, name: str, start: pb.FillStart, send: Send, outlet: Outlet) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.landing: asyncio.Future[pb.FillLanding] = loop.create_future()
        self.outcome = ""
        self._send = send
        self._stopped: asyncio.Future[str] = loop.create_future()
        self._cancelled = False
        self._caller = start.decode_worker_id
        self._address = start.transport_address
        self._checksums = start.checksums
        self._outlet = outlet
        self._traffic_seen = 0

    async def run(self) -> bool:
        """Runs the fill to its end; returns whether the caller was told of it.

        After an unexpected error nothing is claimed: the stream just ends.
        """
        last = None
        try:
            last = await self._run()
        except EngineDiedError:
            self.outcome = "failed"
        except Exception:
            log.exception("fill %s failed unexpectedly", self.name)
            self.outcome = "failed"
            self.stop("it failed unexpectedly")
            self._clear_up()
        finally:
            self._ended()
        if last is not None:
            self._send(last)
        self._send = _drop  # the stream may be another fill's from now on
        return last is not None

    def stop(self, reason: str, *, cancelled: bool = False) -> None:
        """Ends the fill early; the first reason counts."""
        if not self._stopped.done():
            self._cancelled = cancelled
            self._stopped.set_result(reason)

    def heartbeat(self, *, works: bool) -> None:
        """Tells the caller that this process runs, and that this fill is not forgotten if the engine `works`."""
        completed = self._outlet.traffic.completed
        moved, self._traffic_seen = completed != self._traffic_seen, completed
        if works and (moved or not self._only_sends):
            self._send_progress()
        else:
            self._send(pb.FillEvent(alive=pb.FillAlive()))

    # ---- for subclasses ----

    @abstractmethod
    async def _run(self) -> pb.FillEvent:
        """Returns the last event when nothing is in flight."""

    @abstractmethod
    def _clear_up(self) -> None:
        """After an unexpected error: has the engine forget the fill."""

    @abstractmethod
    def _ended(self) -> None:
        """Nothing more will happen."""

    @property
    @abstractmethod
    def _only_sends(self) -> bool:
        """Whether it is only the transport that can bring it on."""

    def _send_progress(self) -> None:
        self._send(pb.FillEvent(progress=pb.FillProgress()))

    async def _unless_stopped(self, future: asyncio.Future[T]) -> T:
        """Raises FillStoppedError when the fill is stopped before the future is resolved."""
        if not future.done():
            waiting: list[asyncio.Future[Any]] = [future, self._stopped]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise FillStoppedError(self._stopped.result())
        return future.result()

    def _deliver_to(self, peer: Peer, landing: pb.FillLanding, blocks: int) -> Delivery:
        """Raises InvalidRequestError if the landing is not for what is left of so many blocks."""
        return Delivery(
            peer,
            landing,
            blocks,
            outlet=self._outlet,
            checksums=self._checksums,
            tell=lambda pages: self._send(pb.FillEvent(pages=pages)),
            failed=self.stop,
        )

    async def _finish(self, delivery: Delivery, error: str = "") -> pb.FillEvent:
        """Everything is being sent, or with an `error` nothing more is."""
        in_flight = asyncio.ensure_future(delivery.done())
        if not error:
            try:
                await self._unless_stopped(in_flight)
            except FillStoppedError as stopped:
                error = str(stopped)
        if error:
            delivery.cancel()
        await in_flight
        return self._release(delivery.pages_sent, error)

    def _release(self, pages_sent: int, error: str) -> pb.FillEvent:
        self.outcome = "cancelled" if error and self._cancelled else "failed" if error else "completed"
        return pb.FillEvent(released=pb.FillReleased(pages=pages_sent, error=error))

    def _refuse(self, message: str, *, queue_full: bool = False) -> pb.FillEvent:
        self.outcome = "failed"
        return _refusal(message, queue_full=queue_full)


class FillServer:
    """Serves fills.

    Args:
        make: Makes a fill that this worker can serve, or raises InvalidRequestError.
        on_end: Called when a fill has ended.

    Attributes:
        outcomes: Of the fills that have ended.
    """

    def __init__(
        self,
        node: Node,
        make: Callable[[pb.FillStart, Send], ServedFill],
        on_end: Callable[[ServedFill], None] = lambda fill: None,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._node = node
        self._make = make
        self._on_end = on_end
        self._fills: dict[ServedFill, asyncio.Task[bool]] = {}
        self._wires: set[Wire] = set()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="fill-heartbeats")

    @property
    def fills(self) -> Collection[ServedFill]:
        """Those that have not ended."""
        return self._fills.keys()

    async def serve(self, wire: Wire) -> None:
        """Serves one stream; a fill outlives it until nothing is in flight."""
        fill: ServedFill | None = None
        self._wires.add(wire)
        try:
            while (message := await wire.receive()) is not None:
                request = message.fill
                match request.WhichOneof("kind"):
                    case "start" if fill is None or fill.outcome:
                        fill = self._begin(request.start, wire)
                    case "cancel" if fill is None:
                        pass  # it has crossed the refusal on its way
                    case _ if fill is None:
                        log.warning("a worker began with what is no FillStart")
                        return
                    case "landing" if not fill.landing.done():
                        fill.landing.set_result(request.landing)
                    case "cancel":
                        fill.stop("cancelled", cancelled=True)
                    case other:
                        fill.stop(f"unexpected message {other!r} in a fill")
        except StreamError as error:
            log.debug("a stream of fills: %s", error)
        finally:
            self._wires.discard(wire)
            if fill is not None:
                fill.stop("the decode worker is gone", cancelled=True)

    async def stop(self) -> None:
        """Ends every fill and waits until nothing is in flight."""
        self._heartbeats.cancel()
        for fill in self._fills:
            fill.stop("the worker stops")
        await asyncio.gather(*self._fills.values())
        for wire in self._wires:
            wire.finish()

    def _begin(self, start: pb.FillStart, wire: Wire) -> ServedFill | None:
        """Runs a fill, or refuses it."""

        def send(event: pb.FillEvent) -> None:
            wire.send(pb.WorkerMessage(fill=event))

        try:
            fill = self._accept(start, send)
        except InvalidRequestError as error:
            send(_refusal(str(error)))
            return None
        task = asyncio.create_task(fill.run(), name=fill.name)
        self._fills[fill] = task
        task.add_done_callback(partial(self._ended, fill, wire))
        self._node.load_changed()
        return fill

    def _accept(self, start: pb.FillStart, send: Send) -> ServedFill:
        node = self._node
        if node.lifecycle.draining.is_set():
            raise InvalidRequestError("this worker drains")
        if start.fingerprint != node.fingerprint:
            raise InvalidRequestError(
                f"workers {start.decode_worker_id} and {node.worker_id} differ in weights, dtype or block size: their "
                "pages cannot be exchanged"
            )
        if start.transport != node.transport.name:
            raise InvalidRequestError(
                f"worker {start.decode_worker_id} moves pages over {start.transport}, {node.worker_id} over "
                f"{node.transport.name}"
            )
        return self._make(start, send)

    def _ended(self, fill: ServedFill, wire: Wire, task: asyncio.Task[bool]) -> None:
        if not task.result():
            wire.abort()
        del self._fills[fill]
        self.outcomes[fill.outcome] += 1
        self._on_end(fill)
        self._node.load_changed()

    async def _send_heartbeats(self) -> None:
        """The engine works if since the last one it has answered, or got on with its step. When it hangs, only the
        process runs."""
        node = self._node
        answer: asyncio.Future[None] | None = None
        progress = node.progress()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            before, progress = progress, node.progress()
            answered = answer is not None and answer.done() and answer.exception() is None
            works = answered or progress != before
            for fill in list(self._fills):
                fill.heartbeat(works=works)
            if answer is None or answer.done():
                answer = node.engine.call(lambda engine: None) if self._fills else None


def _drop(event: pb.FillEvent) -> None:
    """Sends nothing."""


def _refusal(message: str, *, queue_full: bool = False) -> pb.FillEvent:
    """The last event of a fill of which nothing was sent."""
    return pb.FillEvent(refused=pb.FillRefused(message=message, queue_full=queue_full))

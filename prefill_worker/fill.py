"""One Fill as the prefill worker sees it.

States, and what is held in each:

    QUEUED      connects to the decode worker's pool, waits for its turn     a place in the queue
    READY       FillReady is out                                             a place in the queue
    COMPUTING   the prompt is in the engine; finished pages wait for the     a place, an engine request, pins of pages
                landing and are pushed from then on                          that wait or are in flight
    PUSHING     everything is computed, pages are in flight                  pins of pages in flight
    ENDED       FillReleased or FillRefused is out                           nothing

READY is passed at once where pages may wait for their landing (prefill_worker/queue.py), else with the landing.

`stop` (cancel, broken stream, failed transfer, failed request) leads from any state to ENDED, by way of taking the
request out of the engine and waiting until nothing is in flight. The task that runs a fill is never cancelled.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from cpd.blocks import BLOCK_SIZE, blocks_for
from cpd.errors import CPDError, QueueFullError, TransferError
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import Computed, Output, Request
from engine.waiting import terms_of
from kvtransfer.base import PoolMemory, Ticket, Transfer
from kvtransfer.checksums import page_checksums
from prefill_worker.peers import Peers
from prefill_worker.queue import FillQueue
from worker.convert import InvalidRequestError, output_to_wire
from worker.engine_bridge import EngineBridge, EngineDiedError

log = logging.getLogger(__name__)

T = TypeVar("T")


class State(Enum):
    """See the table above."""

    QUEUED = auto()
    READY = auto()
    COMPUTING = auto()
    PUSHING = auto()
    ENDED = auto()


class FillStoppedError(CPDError):
    """The fill is to end early."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages that a step finished: pinned, and to be pushed.

    Attributes:
        first_block: Block of the first page.
        pages: Own pages, in block order.
        num_tokens: Tokens of the prompt that are computed now.
    """

    first_block: int
    pages: list[int]
    num_tokens: int


class PagesToPush:
    """Which pages of one request are still to be pushed. Engine thread only.

    A block that is computed again after a preemption is not pushed again.

    Attributes:
        complete: Whether the last chunk was taken.
    """

    def __init__(self, request: Request) -> None:
        self._num_tokens = len(request.token_ids)
        self._next_block = 0
        self.complete = False

    def take(self, engine: Engine, computed: Computed) -> Chunk:
        """Pins what is newly finished; the partial last page only with the last chunk."""
        done = computed.num_tokens >= self._num_tokens
        end = blocks_for(self._num_tokens) if done else computed.num_tokens // BLOCK_SIZE
        start, self._next_block = self._next_block, max(self._next_block, end)
        self.complete = done
        pages = computed.pages[start : self._next_block]
        engine.pin(pages)
        return Chunk(start, pages, computed.num_tokens)


@dataclass(slots=True)
class Traffic:
    """Counts the transfers that this worker has completed."""

    completed: int = 0


class Fill:
    """See the module's table.

    Args:
        request: The prompt, `prefill_only`.
        start: What the decode worker sent.
        to_push: The engine thread's records of what to push, by request id.
        memory: Of the own pool.

    Attributes:
        state: Where it is.
        landing: To be resolved with the decode worker's answer to FillReady.
        events: What is to be sent, None at the end.
        outcome: How it ended, once it has: completed, failed or cancelled.
    """

    def __init__(
        self,
        request: Request,
        start: pb.FillStart,
        *,
        engine: EngineBridge,
        peers: Peers,
        queue: FillQueue,
        traffic: Traffic,
        to_push: dict[str, PagesToPush],
        memory: PoolMemory,
    ) -> None:
        self.request = request
        self.state = State.QUEUED
        loop = asyncio.get_running_loop()
        self.landing: asyncio.Future[pb.FillLanding] = loop.create_future()
        self.events: asyncio.Queue[pb.FillEvent | None] = asyncio.Queue()
        self.outcome = ""
        self._address = start.transport_address
        self._owner = start.decode_worker_id
        self._checksums = start.checksums
        self._engine = engine
        self._peers = peers
        self._queue = queue
        self._traffic = traffic
        self._traffic_seen = 0
        self._to_push = to_push
        self._memory = memory
        self._stopped: asyncio.Future[str] = loop.create_future()
        self._cancelled = False
        self._computed: asyncio.Future[None] = loop.create_future()
        self._num_computed = 0
        self._first: list[Output] = []
        self._pages_sent = 0
        self._ticket: Ticket | None = None
        self._first_block = 0
        self._unlanded: list[Chunk] = []
        self._transfers: list[tuple[Transfer, asyncio.Task[None]]] = []

    async def run(self) -> None:
        """Runs the fill to its end."""
        last = None  # after an unexpected error nothing is claimed: the stream just ends
        try:
            last = await self._run()
        except EngineDiedError:
            self.outcome = "failed"
        except Exception:
            log.exception("fill %s failed unexpectedly", self.request.id)
            self.outcome = "failed"
            self._engine.post(self._abort)
        finally:
            self.state = State.ENDED
            if last is not None:
                self.events.put_nowait(last)
            self.events.put_nowait(None)

    def stop(self, reason: str, *, cancelled: bool = False) -> None:
        """Ends the fill early; the first reason counts."""
        if not self._stopped.done():
            self._cancelled = cancelled
            self._stopped.set_result(reason)

    def heartbeat(self, *, works: bool) -> None:
        """Tells the decode worker that this process runs, and that this fill is not forgotten if the engine `works`."""
        moved = self._traffic.completed != self._traffic_seen
        self._traffic_seen = self._traffic.completed
        if works and (self.state is not State.PUSHING or moved):
            self._send_progress()
        else:
            self.events.put_nowait(pb.FillEvent(alive=pb.FillAlive()))

    def take_output(self, output: Output) -> None:
        """Takes the first token of a choice; all of them are sent together."""
        self._first.append(output)
        if len(self._first) == self.request.n:
            self.events.put_nowait(
                pb.FillEvent(
                    first_tokens=pb.FillFirstTokens(
                        outputs=[output_to_wire(first) for first in self._first],
                        cached_tokens=self._first[0].cached_tokens or 0,
                        queue_ms=self._first[0].queued_s * 1000,
                    )
                )
            )

    def push(self, chunk: Chunk) -> None:
        """Takes pages that a step has finished."""
        self._num_computed = max(self._num_computed, chunk.num_tokens)
        self._send_progress()
        if chunk.pages:
            self._push_pages(chunk)
        left = len(self.request.token_ids) - self._num_computed
        self._queue.computed(self._place, left, time.monotonic())
        if left == 0 and not self._computed.done():
            self._computed.set_result(None)

    # ---- the states ----

    async def _run(self) -> pb.FillEvent:
        try:
            self._place = self._queue.enter(self._owner, terms_of(self.request), time.monotonic())
        except QueueFullError as error:
            return self._refuse(str(error), queue_full=True)
        self._send_progress()  # says: it is in the queue
        request = self.request
        self._engine.call(lambda engine: engine.uncached_tokens(request)).add_done_callback(self._heard_uncached)
        try:
            async with self._peers.use(self._address) as peer:
                self._peer = peer
                await self._unless_stopped(self._place.turn)
                self.state = State.READY
                self.events.put_nowait(pb.FillEvent(ready=pb.FillReady()))
                if not self._place.early:
                    await self._unless_stopped(self.landing)
                await self._engine.call(self._start)
                return await self._compute_and_push()
        except FillStoppedError as error:
            return self._release(str(error))
        except QueueFullError as error:
            return self._refuse(str(error), queue_full=True)
        except (TransferError, ValueError) as error:
            return self._refuse(str(error))
        finally:
            self._queue.leave(self._place, time.monotonic())

    def _heard_uncached(self, uncached: "asyncio.Future[int]") -> None:
        if self.state is State.QUEUED and uncached.exception() is None:
            self._queue.computed(self._place, uncached.result(), time.monotonic())

    def _start(self, engine: Engine) -> None:
        engine.add(self.request)
        self._to_push[self.request.id] = PagesToPush(self.request)

    def _abort(self, engine: Engine) -> None:
        engine.abort(self.request.id)
        self._to_push.pop(self.request.id, None)

    async def _compute_and_push(self) -> pb.FillEvent:
        """From here on pages may be in flight: the only way out is when none is."""
        self.state = State.COMPUTING
        error = ""
        try:
            self._land(await self._unless_stopped(self.landing))
            await self._unless_stopped(self._computed)
        except (FillStoppedError, InvalidRequestError) as stopped:
            error = str(stopped)
            self.stop(error)
            # When it returns, what the engine had finished before has been handed to `push`.
            await self._engine.call(self._abort)
            for chunk in self._unlanded:
                self._unpin(chunk.pages)
        self._queue.leave(self._place, time.monotonic())
        self.state = State.PUSHING
        in_flight = asyncio.gather(*(task for _, task in self._transfers))
        if not error:
            try:
                await self._unless_stopped(in_flight)
            except FillStoppedError as stopped:
                error = str(stopped)
        if error:
            for transfer, _ in self._transfers:
                transfer.cancel()
        await in_flight
        return self._release(error)

    def _land(self, landing: pb.FillLanding) -> None:
        self._ticket, self._first_block = _ticket(landing, self.request), landing.first_block
        self._queue.landed(self._place, time.monotonic())
        unlanded, self._unlanded = self._unlanded, []
        for chunk in unlanded:
            self._push_pages(chunk)

    def _push_pages(self, chunk: Chunk) -> None:
        if self._stopped.done():
            self._unpin(chunk.pages)
            return
        if self._ticket is None:
            self._unlanded.append(chunk)
            return
        there = min(max(self._first_block - chunk.first_block, 0), len(chunk.pages))  # the decode worker has them
        index = chunk.first_block + there - self._first_block
        self._unpin(chunk.pages[:there])
        if pages := chunk.pages[there:]:
            self._push_run(self._ticket, index, pages)

    def _push_run(self, ticket: Ticket, index: int, pages: list[int]) -> None:
        try:
            transfer = self._peer.push(ticket, [(page, index + i) for i, page in enumerate(pages)])
        except (TransferError, ValueError) as error:
            self._unpin(pages)
            self.stop(str(error))
            return
        told = asyncio.create_task(self._tell(ticket, index, pages))
        self._transfers.append((transfer, asyncio.create_task(self._finish(transfer, told, pages))))

    async def _tell(self, ticket: Ticket, index: int, pages: list[int]) -> None:
        """Says which pages are on their way, so that the decode worker can check what arrives."""
        checksums = await asyncio.to_thread(page_checksums, self._memory, pages) if self._checksums else b""
        message = pb.FillPages(
            reservation=ticket.reservation,
            generation=ticket.generation,
            first_block=self._first_block + index,
            pages=len(pages),
            checksums=checksums,
        )
        self.events.put_nowait(pb.FillEvent(pages=message))

    async def _finish(self, transfer: Transfer, told: asyncio.Task[None], pages: list[int]) -> None:
        try:
            await told  # it reads the pages, too
            await transfer.done()
        except TransferError as error:
            self.stop(str(error))
        else:
            self._pages_sent += len(pages)
            self._traffic.completed += 1
        finally:
            self._unpin(pages)

    # ---- small parts ----

    async def _unless_stopped(self, future: asyncio.Future[T]) -> T:
        waiting: list[asyncio.Future[Any]] = [future, self._stopped]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise FillStoppedError(self._stopped.result())
        return future.result()

    def _unpin(self, pages: list[int]) -> None:
        if pages:
            self._engine.post(lambda engine: engine.unpin(pages))

    def _send_progress(self) -> None:
        self.events.put_nowait(pb.FillEvent(progress=pb.FillProgress(computed_tokens=self._num_computed)))

    def _release(self, error: str) -> pb.FillEvent:
        self.outcome = "cancelled" if error and self._cancelled else "failed" if error else "completed"
        return pb.FillEvent(released=pb.FillReleased(pages=self._pages_sent, error=error))

    def _refuse(self, message: str, *, queue_full: bool = False) -> pb.FillEvent:
        self.outcome = "failed"
        return refusal(message, queue_full=queue_full)


def refusal(message: str, *, queue_full: bool = False) -> pb.FillEvent:
    """The last event of a fill of which nothing was sent."""
    return pb.FillEvent(refused=pb.FillRefused(message=message, queue_full=queue_full))


def _ticket(landing: pb.FillLanding, request: Request) -> Ticket:
    needed = blocks_for(len(request.token_ids)) - landing.first_block
    if needed < 0 or len(landing.pages) != needed:
        raise InvalidRequestError(
            f"the landing has {len(landing.pages)} pages from block {landing.first_block} on, but the prompt has "
            f"{blocks_for(len(request.token_ids))} blocks"
        )
    return Ticket(
        epoch=landing.epoch,
        reservation=landing.reservation,
        generation=landing.generation,
        pages=tuple(landing.pages),
    )

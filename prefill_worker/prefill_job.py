"""One Fill as the prefill worker sees it.

States, and what is held in each:

    CONNECTING  connects to the decode worker's pool                         nothing
    QUEUED      waits for its turn                                           a place in the queue
    READY       FillReady is out                                             a place in the queue
    COMPUTING   the prompt is in the engine; finished pages wait for the     a place, an engine request, pins of pages
                landing and are pushed from then on                          that wait or are in flight
    PUSHING     everything is computed, pages are in flight                  pins of pages in flight
    ENDED       FillReleased or FillRefused is out                           nothing

READY is passed at once where pages may wait for their landing (prefill_worker/job_queue.py), else with the landing.

`stop` (cancel, broken stream, failed transfer, failed request) leads from any state to ENDED, by way of taking the
request out of the engine and waiting until nothing is in flight.
"""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum, auto

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.common.errors import QueueFullError, TransferError
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.scheduling.waiting_queue import terms_of
from engine.types import Computed, Output, Request
from prefill_worker.job_queue import FillQueue
from worker.convert import InvalidRequestError, output_to_wire
from worker.delivery import Delivery, Outlet
from worker.fills import FillStoppedError, Send, ServedFill
from worker.peers import Peers


class State(Enum):
    """See the table above."""

    CONNECTING = auto()
    QUEUED = auto()
    READY = auto()
    COMPUTING = auto()
    PUSHING = auto()
    ENDED = auto()


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


class Fill(ServedFill):
    """See the module's table.

    Args:
        request: The prompt, `prefill_only`.
        start: What the decode worker sent.
        send: Sends it an event.
        outlet: By which its pages leave.
        to_push: The engine thread's records of what to push, by request id.

    Attributes:
        state: Where it is.
    """

    def __init__(
        self,
        request: Request,
        start: pb.FillStart,
        send: Send,
        *,
        outlet: Outlet,
        peers: Peers,
        queue: FillQueue,
        to_push: dict[str, PagesToPush],
    ) -> None:
        super().__init__(request.id, start, send, outlet)
        self.request = request
        self.state = State.CONNECTING
        self._engine = outlet.engine
        self._peers = peers
        self._queue = queue
        self._to_push = to_push
        self._computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_computed = 0
        self._first: list[Output] = []
        self._delivery: Delivery | None = None
        self._unlanded: list[Chunk] = []

    def take_output(self, output: Output) -> None:
        """Takes the first token of a choice; all of them are sent together."""
        self._first.append(output)
        if len(self._first) == self.request.n:
            self._send(
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
        self._send_progress()  # says: it was taken
        try:
            async with self._peers.use(self._address) as connecting:
                self._peer = await self._unless_stopped(connecting)
                self._place = self._queue.enter(self._caller, terms_of(self.request), time.monotonic())
                try:
                    return await self._take_turn()
                finally:
                    self._queue.leave(self._place, time.monotonic())
        except FillStoppedError as error:
            return self._release(0, str(error))
        except QueueFullError as error:
            return self._refuse(str(error), queue_full=True)
        except (TransferError, ValueError) as error:
            return self._refuse(str(error))

    async def _take_turn(self) -> pb.FillEvent:
        self.state = State.QUEUED
        request = self.request
        self._engine.call(lambda engine: engine.uncached_tokens(request)).add_done_callback(self._heard_uncached)
        await self._unless_stopped(self._place.turn)
        self.state = State.READY
        self._send(pb.FillEvent(ready=pb.FillReady()))
        if not self._place.early:
            await self._unless_stopped(self.landing)
        await self._engine.call(self._start)
        return await self._compute_and_push()

    def _heard_uncached(self, uncached: "asyncio.Future[int]") -> None:
        if uncached.exception() is None and self.state is State.QUEUED:
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
            self._unpin_unlanded()
        self._queue.leave(self._place, time.monotonic())
        self.state = State.PUSHING
        return await self._finish(self._delivery, error) if self._delivery else self._release(0, error)

    def _land(self, landing: pb.FillLanding) -> None:
        self._delivery = self._deliver_to(self._peer, landing, blocks_for(len(self.request.token_ids)))
        self._queue.landed(self._place, time.monotonic())
        unlanded, self._unlanded = self._unlanded, []
        for chunk in unlanded:
            self._push_pages(chunk)

    def _push_pages(self, chunk: Chunk) -> None:
        if self._stopped.done():
            self._outlet.unpin(chunk.pages)
        elif self._delivery is None:
            self._unlanded.append(chunk)
        else:
            self._delivery.push(chunk.first_block, chunk.pages)

    # ---- small parts ----

    @property
    def _only_sends(self) -> bool:
        return self.state is State.PUSHING

    def _clear_up(self) -> None:
        self._engine.post(self._abort)
        self._unpin_unlanded()

    def _unpin_unlanded(self) -> None:
        unlanded, self._unlanded = self._unlanded, []
        for chunk in unlanded:
            self._outlet.unpin(chunk.pages)

    def _ended(self) -> None:
        self.state = State.ENDED

    def _send_progress(self) -> None:
        self._send(pb.FillEvent(progress=pb.FillProgress(computed_tokens=self._num_computed)))

"""One prefill request, as the prefill worker sees it.

States, and what is held in each:

    CONNECTING  compiles a grammar, connects to the decode worker's pool     nothing
    QUEUED      waits until the queue grants it                              a place in the queue
    READY       PrefillReady is sent                                         a place in the queue
    COMPUTING   the engine computes the prompt; finished pages wait for the  a place in the queue, an engine request,
                landing, and are sent from then on                           pins of pages that wait or are in flight
    SENDING     everything is computed, pages are in flight                  pins of pages in flight
    ENDED       PrefillReleased or PrefillRefused is sent                    nothing

READY ends at once if pages may wait for their landing (prefill_worker/job_queue.py), else with the landing.

`stop` (cancel, broken stream, failed transfer, failed request) leads from any state to ENDED: it removes the request
from the engine and waits until nothing is in flight.
"""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum, auto

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.common.errors import QueueFullError, TransferError
from cpd.grammar.grammar import GrammarError
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.scheduling.waiting_queue import terms_of
from engine.types import Computed, Output, Request
from prefill_worker.job_queue import JobQueue
from worker.grammars import Grammars
from worker.page_sender import PageSender, SourcePool
from worker.pool_connections import PoolConnections
from worker.prefill_server import PrefillStoppedError, Send, ServedPrefill
from worker.wire_format import InvalidRequestError, output_to_wire


class PrefillJobState(Enum):
    """See the module's table."""

    CONNECTING = auto()
    QUEUED = auto()
    READY = auto()
    COMPUTING = auto()
    SENDING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class FinishedPages:
    """Pages that a step has finished, pinned until they are sent.

    Attributes:
        first_block: Block of the first page.
        pages: Pages of this worker's pool, in block order.
        num_tokens: Prompt tokens computed so far.
    """

    first_block: int
    pages: list[int]
    num_tokens: int


class PagesToSend:
    """Tracks which pages of one request are still to be sent. Only the engine thread uses it.

    A block that is computed again after a preemption is not sent again.

    Attributes:
        complete: True when the last page was taken.
    """

    def __init__(self, request: Request) -> None:
        self._num_tokens = len(request.token_ids)
        self._next_block = 0
        self.complete = False

    def take(self, engine: Engine, computed: Computed) -> FinishedPages:
        """Pins and returns the newly finished pages; a partial last page comes with the last chunk."""
        done = computed.num_tokens >= self._num_tokens
        end = blocks_for(self._num_tokens) if done else computed.num_tokens // BLOCK_SIZE
        start, self._next_block = self._next_block, max(self._next_block, end)
        self.complete = done
        pages = computed.pages[start : self._next_block]
        engine.pin(pages)
        return FinishedPages(start, pages, computed.num_tokens)


class PrefillJob(ServedPrefill):
    """See the module's table.

    Args:
        request: The prompt, with `prefill_only` set.
        start: The decode worker's first message.
        send: Sends it an event.
        source: This worker's pages.
        pools: Connections to other workers' pools.
        grammars: Compiles the request's grammar, if it has one.
        to_send: The engine thread's records of pages to send, by request id.
    """

    def __init__(
        self,
        request: Request,
        start: pb.PrefillStart,
        send: Send,
        *,
        source: SourcePool,
        pools: PoolConnections,
        queue: JobQueue,
        grammars: Grammars,
        to_send: dict[str, PagesToSend],
    ) -> None:
        super().__init__(request.id, start, send, source)
        self.request = request
        self.state = PrefillJobState.CONNECTING
        self._engine = source.engine
        self._pools = pools
        self._queue = queue
        self._grammars = grammars
        self._to_send = to_send
        self._computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_computed = 0
        self._first: list[Output] = []
        self._page_sender: PageSender | None = None
        self._unlanded: list[FinishedPages] = []

    def take_output(self, output: Output) -> None:
        """Takes the first token of a choice. Those of all choices are sent together."""
        self._first.append(output)
        if len(self._first) == self.request.n:
            if self.trace is not None:
                now = time.monotonic()
                self.trace.phase("queue", min(now, self.request.received + self._first[0].queued_s))
                self.trace.phase("prefill", now, {"cpd.cached_tokens": self._first[0].cached_tokens or 0})
            self._send(
                pb.PrefillEvent(
                    first_tokens=pb.PrefillFirstTokens(
                        outputs=[output_to_wire(first) for first in self._first],
                        cached_tokens=self._first[0].cached_tokens or 0,
                        queue_ms=self._first[0].queued_s * 1000,
                    )
                )
            )

    def take_pages(self, finished: FinishedPages) -> None:
        """Sends the pages of a step, or keeps them until the landing is known."""
        self._num_computed = max(self._num_computed, finished.num_tokens)
        self._send_progress()
        if finished.pages:
            self._send_pages(finished)
        left = len(self.request.token_ids) - self._num_computed
        self._queue.set_tokens_left(self._queued, left, time.monotonic())
        if left == 0 and not self._computed.done():
            self._computed.set_result(None)

    # ---- the states ----

    async def _run(self) -> pb.PrefillEvent:
        self._send_progress()  # the request was accepted
        try:
            self.request = await self._grammars.constrain(self.request)
            if self.trace is not None and self.request.constraint is not None:
                self.trace.phase("grammar", time.monotonic())
            async with self._pools.use(self._address) as connecting:
                self._peer = await self._unless_stopped(connecting)
                self._queued = self._queue.add(self._caller, terms_of(self.request), time.monotonic())
                try:
                    return await self._wait_and_start()
                finally:
                    self._queue.remove(self._queued, time.monotonic())
        except (PrefillStoppedError, TransferError) as error:
            return self._release(0, str(error))
        except QueueFullError as error:
            return self._refuse(str(error), queue_full=True)
        except (GrammarError, ValueError) as error:
            return self._refuse(str(error))

    async def _wait_and_start(self) -> pb.PrefillEvent:
        self.state = PrefillJobState.QUEUED
        request = self.request
        self._engine.call(lambda engine: engine.uncached_tokens(request)).add_done_callback(self._set_uncached)
        await self._unless_stopped(self._queued.granted)
        self.state = PrefillJobState.READY
        self._send(pb.PrefillEvent(ready=pb.PrefillReady()))
        if not self._queued.early:
            await self._unless_stopped(self.landing)
        await self._engine.call(self._start)
        return await self._compute_and_send()

    def _set_uncached(self, uncached: "asyncio.Future[int]") -> None:
        if uncached.exception() is None and self.state is PrefillJobState.QUEUED:
            self._queue.set_tokens_left(self._queued, uncached.result(), time.monotonic())

    def _start(self, engine: Engine) -> None:
        engine.add(self.request)
        self._to_send[self.request.id] = PagesToSend(self.request)

    def _abort(self, engine: Engine) -> None:
        engine.abort(self.request.id)
        self._to_send.pop(self.request.id, None)

    async def _compute_and_send(self) -> pb.PrefillEvent:
        """Returns only when no pages are in flight."""
        self.state = PrefillJobState.COMPUTING
        error = ""
        try:
            self._land(await self._unless_stopped(self.landing))
            await self._unless_stopped(self._computed)
        except (PrefillStoppedError, InvalidRequestError) as stopped:
            error = str(stopped)
            self.stop(error)
            # When it returns, all pages finished before have reached `take_pages`.
            await self._engine.call(self._abort)
            self._unpin_unlanded()
        self._queue.remove(self._queued, time.monotonic())
        self.state = PrefillJobState.SENDING
        return await self._finish(self._page_sender, error) if self._page_sender else self._release(0, error)

    def _land(self, landing: pb.PrefillLanding) -> None:
        self._page_sender = self._sender(self._peer, landing, blocks_for(len(self.request.token_ids)))
        self._queue.set_landed(self._queued, time.monotonic())
        unlanded, self._unlanded = self._unlanded, []
        for finished in unlanded:
            self._send_pages(finished)

    def _send_pages(self, finished: FinishedPages) -> None:
        if self._stopped.done():
            self._source.unpin(finished.pages)
        elif self._page_sender is None:
            self._unlanded.append(finished)
        else:
            self._page_sender.send(finished.first_block, finished.pages)

    # ---- small parts ----

    @property
    def _only_sends(self) -> bool:
        return self.state is PrefillJobState.SENDING

    def _clear_up(self) -> None:
        self._engine.post(self._abort)
        self._unpin_unlanded()

    def _unpin_unlanded(self) -> None:
        unlanded, self._unlanded = self._unlanded, []
        for finished in unlanded:
            self._source.unpin(finished.pages)

    def _ended(self) -> None:
        self.state = PrefillJobState.ENDED

    def _send_progress(self) -> None:
        self._send(pb.PrefillEvent(progress=pb.PrefillProgress(computed_tokens=self._num_computed)))

"""What a worker does for others, whatever its role: answer requests, compute prompts, provide its cache.

    from               message                              part
    routers            Submit, Abort, Park                  decode part (`decode_worker/`)
    other workers      PrefillStart                         prefill part (`prefill_worker/`)
                       PrefillStart with `cache_only`       `prefix_job.py`

A worker never waits for pages that another worker computes while it computes prompts for others. Otherwise two workers
whose pools are full of reserved pages could wait for each other. So it computes requests itself while it has prefill
jobs, and refuses prefill jobs while it waits for remote prefills.

While the worker's model sleeps (`sleeper.py`), requests of routers wait in the engine's queue, and other workers are
refused.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import StepOutput
from worker.async_engine import Update
from worker.context import WorkerContext
from worker.page_sender import SourcePool
from worker.pool_connections import PoolConnections
from worker.prefill_server import IncomingStream, PrefillServer, Send, ServedPrefill
from worker.prefix_job import PrefixJob
from worker.router_session import RouterSession
from worker.session_server import RequestHandler
from worker.wire_format import InvalidRequestError


class Part(Protocol):
    """A part of a worker. Runs on the event loop."""

    @property
    def waiting(self) -> int:
        """Number of requests that the engine does not have yet."""

    def update(self, update: Update) -> None:
        """Handles the results of a pass."""

    def add_load(self, load: pb.Load) -> None:
        """Adds what the engine does not know to a load report."""

    def hand_over(self) -> None:
        """Gives what still runs to other workers, because the time of a drain is over. Called again and again."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The requests of routers that have not ended.

    Attributes:
        requests: Their number.
        under_way: Those that the engine does not have yet.
        deadlines: When each misses its target if it gets no more tokens, on the clock of `time.monotonic`.
        tokens_left: Predicted number of output tokens of the longest one that has a token.
    """

    requests: int
    under_way: int
    deadlines: list[float]
    tokens_left: float


class DecodePart(Part, RequestHandler, Protocol):
    """Answers the requests of routers."""

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""

    @property
    def waits_for_pages(self) -> bool:
        """True while a request may wait for pages that another worker computes."""

    def outlook(self) -> Outlook:
        """Returns what is known of the requests."""

    def pause(self) -> None:
        """Ends what needs pages of the pool, because the model goes to sleep. Requests go to the engine's queue."""

    def fail_all(self, reason: str, retry_after_s: float) -> None:
        """Fails every request: the model is asleep, and can't wake.

        Args:
            retry_after_s: When it may be tried again; 0: that is not known.
        """

    async def stop(self) -> None:
        """Ends every request in order; returns when nothing more will be sent. It has about a second."""


class PrefillPart(Part, Protocol):
    """Computes prompts for other workers."""

    @property
    def busy(self) -> bool:
        """True while a job has not ended."""

    def after_pass(self, engine: Engine, output: StepOutput | None) -> None:
        """Runs on the engine thread after every pass."""

    def make(self, start: pb.PrefillStart, send: Send) -> ServedPrefill:
        """Makes a job. Raises InvalidRequestError."""

    def ended(self, job: ServedPrefill) -> None:
        """Forgets a job that has ended."""


MakeDecodePart = Callable[[WorkerContext, SourcePool, Callable[[], bool]], DecodePart]
"""The last argument tells whether the worker computes prompts for others."""
MakePrefillPart = Callable[[WorkerContext, SourcePool, PoolConnections], PrefillPart]


class WorkerService:
    """Both parts of a worker, and its cache. Everything but `after_pass` runs on the event loop.

    Args:
        make_decode: Makes the decode part.
        make_prefill: Makes the prefill part.

    Attributes:
        decode: The decode part.
        prefill: The prefill part.
    """

    def __init__(self, context: WorkerContext, make_decode: MakeDecodePart, make_prefill: MakePrefillPart) -> None:
        self._pools = PoolConnections(context.transport)
        self._pages = SourcePool(context.engine, context.memory)
        self._model = context.model
        self._server = PrefillServer(context, self._make, self._ended)
        self._numbers = itertools.count(1)
        self._fetches: Counter[str] = Counter()
        self.decode = make_decode(context, self._pages, lambda: self.prefill.busy)
        self.prefill = make_prefill(context, self._pages, self._pools)

    @property
    def busy(self) -> bool:
        """True while a request or prefill request has not ended. Quarantined pages don't count."""
        return bool(self.decode.busy or self._server.running)

    @property
    def waiting(self) -> int:
        """Number of requests that the engine does not have yet."""
        return self.decode.waiting + self.prefill.waiting

    @property
    def served(self) -> int:
        """Number of requests of other workers that have not ended."""
        return len(self._server.running)

    def outlook(self) -> Outlook:
        """Returns what is known of the requests of routers."""
        return self.decode.outlook()

    # ---- from the engine ----

    def after_pass(self, engine: Engine, output: StepOutput | None) -> None:
        """Runs on the engine thread after every pass."""
        self.prefill.after_pass(engine, output)

    def update(self, update: Update) -> None:
        """Sends the results of a pass: tokens first, then pages."""
        self.decode.update(update)
        self.prefill.update(update)

    def add_load(self, load: pb.Load) -> None:
        """Adds what the engine does not know to a load report."""
        self.decode.add_load(load)
        self.prefill.add_load(load)
        self._pages.add_load(load)
        if served := self._fetches["completed"]:
            load.prefix_fetches["served"] = served

    # ---- from routers ----

    def submit(self, session: RouterSession, message: pb.Submit) -> None:
        """Starts to answer a request."""
        self.decode.submit(session, message)
        self._model.request_arrived()

    def abort(self, session: RouterSession, message: pb.Abort) -> None:
        """Ends a request or some of its choices."""
        self.decode.abort(session, message)
        if message.given_up:
            self._model.request_given_up()

    def park(self, session: RouterSession, message: pb.Park) -> None:
        """Parks a request, so that it can continue on another worker."""
        self.decode.park(session, message)

    def session_ended(self, session: RouterSession) -> None:
        """Aborts all requests of `session`."""
        self.decode.session_ended(session)

    # ---- from other workers ----

    async def serve_worker(self, stream: IncomingStream) -> None:
        """Serves another worker's stream of prefill requests."""
        await self._server.serve(stream)

    def _make(self, start: pb.PrefillStart, send: Send) -> ServedPrefill:
        if start.cache_only:
            return PrefixJob(f"prefix-{next(self._numbers)}", start, send, source=self._pages, pools=self._pools)
        if self.decode.waits_for_pages:
            raise InvalidRequestError("this worker waits for remote prefills of its own")
        return self.prefill.make(start, send)

    def _ended(self, served: ServedPrefill) -> None:
        if isinstance(served, PrefixJob):
            self._fetches[served.outcome] += 1
        else:
            self.prefill.ended(served)

    def fail_all(self, reason: str, retry_after_s: float) -> None:
        """Fails every request of routers: the model is asleep, and can't wake."""
        self.decode.fail_all(reason, retry_after_s)

    # ---- the end ----

    async def pause(self) -> None:
        """Ends what needs pages of the pool, because the model goes to sleep; returns when no other worker sends any.

        Requests of routers go to the engine's queue.
        """
        self.decode.pause()
        await self._server.end_all("the model of this worker goes to sleep")
        await self._pools.close()

    def hand_over(self) -> None:
        """Gives what still runs to other workers, because the time of a drain is over. Called again and again."""
        self.decode.hand_over()
        self.prefill.hand_over()

    async def stop(self) -> None:
        """Ends everything in order; returns when nothing more will be sent. It has about a second."""
        await self.decode.stop()
        await self._server.stop()
        await self._pools.close()

"""The decode part of a worker: answers routers' requests."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from cpd.grammar.grammar import GrammarError
from cpd.rpc import cpd_pb2 as pb
from decode_worker.answer_trace import AnswerTrace
from decode_worker.prefill_coordinator import PrefillCoordinator
from decode_worker.router_request import Key, RouterRequest
from engine.engine import Engine
from worker.async_engine import Update
from worker.context import EXIT_RESTART, WorkerContext
from worker.page_sender import SourcePool
from worker.router_session import RouterSession
from worker.service import Outlook
from worker.wire_format import InvalidRequestError, request_from_wire

if TYPE_CHECKING:
    from cpd.common.tracing import Value

log = logging.getLogger(__name__)

MAX_QUARANTINED = 0.2
"""Share of the pool. With more pages quarantined for `prefill_progress_s`, the worker drains and restarts.

Short times are normal: each cancelled remote prefill may leave some pages quarantined for a moment.
"""


LENGTH_WEIGHT = 0.05
"""Weight of an answer in the mean of their lengths."""


class DecodeService:
    """See `worker.service.DecodePart`."""

    def __init__(self, context: WorkerContext, pages: SourcePool, computes_for_others: Callable[[], bool]) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        self._requests: dict[Key, RouterRequest] = {}
        self._by_engine_id: dict[str, RouterRequest] = {}
        self._coordinator = PrefillCoordinator(context, self._by_engine_id.__setitem__, computes_for_others)
        self._restart: asyncio.TimerHandle | None = None
        self._pages = pages
        self._constraining: set[asyncio.Task[None]] = set()
        self._mean_output = 0.0  # tokens of recent answers

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""
        return bool(self._requests)

    @property
    def waiting(self) -> int:
        """Number of requests that the engine does not have yet."""
        return self._coordinator.waiting

    @property
    def waits_for_pages(self) -> bool:
        """True while a request may wait for pages that another worker computes."""
        return self._coordinator.waits_for_pages

    def outlook(self) -> Outlook:
        """Returns what is known of the requests."""
        requests, slo_itl_s = self._requests.values(), self._context.settings.slo_itl / 1e3
        expected = max(1.0, self._mean_output)
        return Outlook(
            requests=len(requests),
            under_way=self.waiting,
            deadlines=[request.deadline(slo_itl_s) for request in requests],
            tokens_left=max(
                (max(expected - request.mean_output, expected / 4) for request in requests if request.started),
                default=0.0,
            ),
        )

    # ---- from the engine ----

    def update(self, update: Update) -> None:
        """Sends a step's tokens. Those for one router go into one message."""
        if update.output is not None:
            for output in update.output.outputs:
                if request := self._by_engine_id.get(output.request_id):
                    request.send([output])
            for request_id, reason in update.output.failed:
                if request := self._by_engine_id.get(request_id):
                    request.refuse(pb.Refusal.KIND_FAILED, reason)
                    self._abort(request, [])  # the engine may have others of its choices under other names
        if update.stats is not None:
            self._watch_quarantine(update.stats.pages.quarantined)

    def add_load(self, load: pb.Load) -> None:
        """Adds the requests that the engine does not know yet."""
        load.waiting += self.waiting
        load.remote_prefills.update(self._coordinator.remote_prefills)
        load.prefix_fetches.update(self._coordinator.prefix_fetches)
        load.transfer_failures.update(self._coordinator.failures)
        load.moving = self._context.lifecycle.time_is_over

    # ---- from routers ----

    def submit(self, session: RouterSession, message: pb.Submit) -> None:
        """Starts to answer a request."""
        key = (session.number, message.request, message.attempt)
        if key in self._requests:
            log.warning("router %s sent request %d twice", session.router_id, message.request)
            return
        refuse = partial(_refuse, session, message)
        parked = self._parked_request(session, message) if message.HasField("resumes") else None
        if message.HasField("resumes") and parked is None:
            refuse(pb.Refusal.KIND_REROUTE, "the request is not parked here")
            return
        if parked is None and self._context.lifecycle.draining.is_set():
            refuse(pb.Refusal.KIND_REROUTE, "this worker drains")
            return
        name = f"request-{next(self._numbers)}"
        try:
            engine_request = request_from_wire(message, name, self._context.limits, time.monotonic())
        except InvalidRequestError as error:
            refuse(pb.Refusal.KIND_FAILED, str(error))
            return
        request = RouterRequest(session, message, engine_request)
        request.trace = self._trace(message, engine_request.received)
        self._requests[key] = request
        self._by_engine_id[engine_request.id] = request
        request.ended.add_done_callback(lambda _: self._forget(request))
        resumed = parked is not None
        if engine_request.params.grammar is None:
            self._start(request, message, resumed=resumed)
        else:
            task = asyncio.create_task(self._constrain(request, message, resumed=resumed), name=f"grammar-{name}")
            self._constraining.add(task)
            task.add_done_callback(self._constraining.discard)
        if parked is not None:
            parked.close(range(message.choice, message.choice + message.n))

    async def _constrain(self, request: RouterRequest, message: pb.Submit, *, resumed: bool) -> None:
        """Starts a request whose output must follow a grammar."""
        try:
            request.request = await self._context.grammars.constrain(request.request)
            if request.trace is not None:
                request.trace.grammar_compiled()
        except GrammarError as error:
            request.refuse(pb.Refusal.KIND_FAILED, str(error))
            return
        if not request.ended.done():
            self._start(request, message, resumed=resumed)

    def _start(self, request: RouterRequest, message: pb.Submit, *, resumed: bool) -> None:
        engine_request = request.request
        if resumed or not (message.prefill_candidates or message.HasField("prefix_source")):
            added = self._context.engine.call(lambda engine: engine.add(engine_request, resumed=resumed))
            added.add_done_callback(partial(_refuse_if_failed, request))
        else:
            self._coordinator.start(request, message)

    def abort(self, session: RouterSession, message: pb.Abort) -> None:
        """Ends a request or some of its choices; the router gets no more of them."""
        request = self._requests.get((session.number, message.request, message.attempt))
        if request is not None:
            self._abort(request, message.choices or list(request.open))

    def park(self, session: RouterSession, message: pb.Park) -> None:
        """Parks a request, so that it can continue on another worker."""
        request = self._requests.get((session.number, message.request, message.attempt))
        if request is None or request.parking:
            return
        if not request.started:
            request.refuse(pb.Refusal.KIND_REROUTE, "this worker drains, or became a prefill worker")
            self._abort(request, [])
            return
        request.parking = True
        engine_ids = list(request.engine_ids)
        parked = self._context.engine.call(lambda engine: _park_all(engine, engine_ids))
        parked.add_done_callback(partial(self._parked, request))

    def pause(self) -> None:
        """Ends what needs pages of the pool, because the model goes to sleep. Requests go to the engine's queue."""
        self._coordinator.interrupt()
        for request in self._requests.values():
            self._unpin(request)

    def session_ended(self, session: RouterSession) -> None:
        """Aborts all requests of `session`."""
        for request in [request for request in self._requests.values() if request.session is session]:
            self._abort(request, list(request.open))

    def hand_over(self) -> None:
        """Tells the routers to move this worker's requests, which they do as soon as another worker can take them."""
        self._context.load_changed()

    def fail_all(self, reason: str, retry_after_s: float) -> None:
        """Fails every request but those parked for another worker: the model is asleep, and can't wake."""
        for request in [one for one in self._requests.values() if not one.parking]:
            request.refuse(pb.Refusal.KIND_FAILED, reason, retry_after_s=retry_after_s)
            self._abort(request, [])

    async def stop(self) -> None:
        """Sends every request back to its router.

        If the worker failed, the requests end with the sessions instead: one of them may be the cause.
        """
        for request in list(self._requests.values()):
            if not self._context.lifecycle.failed:
                request.refuse(pb.Refusal.KIND_REROUTE, "this worker stops")
            self._abort(request, [])
        for task in self._constraining:
            task.cancel()
        await self._coordinator.stop()
        if self._restart is not None:
            self._restart.cancel()

    def _watch_quarantine(self, pages: int) -> None:
        num_pages = self._context.memory.num_pages
        if pages <= MAX_QUARANTINED * num_pages:
            if self._restart is not None:
                self._restart.cancel()
                self._restart = None
        elif self._restart is None:
            reason = f"{pages} of {num_pages} pages stay in quarantine"
            self._restart = asyncio.get_running_loop().call_later(
                self._context.settings.prefill_progress_s, self._context.lifecycle.drain, reason, EXIT_RESTART
            )

    def _abort(self, request: RouterRequest, choices: Collection[int]) -> None:
        request.close(choices)
        closed, engine_ids = list(request.closed), list(request.engine_ids)
        self._context.engine.post(lambda engine: _abort_all(engine, engine_ids, closed))
        self._context.engine.nudge()  # the coordinator may be polling for this request

    def _parked_request(self, session: RouterSession, message: pb.Submit) -> RouterRequest | None:
        """Returns the parked request with which a Submit goes on, if its choices are still open."""
        request = self._requests.get((session.number, message.resumes.request, message.resumes.attempt))
        choices = set(range(message.choice, message.choice + message.n))
        return request if request is not None and request.parking and choices <= set(request.open) else None

    def _parked(self, request: RouterRequest, parked: "asyncio.Future[list[int] | None]") -> None:
        if parked.exception() is not None:
            return  # the engine has failed, and the session ends
        pages = parked.result()
        if pages is None:  # it has ended, or is not in the engine yet: its pages are still on their way
            request.parking = False
            return
        request.pinned = pages
        if request.ended.done() or not self._context.model.state.has_memory:
            self._unpin(request)
        if not request.ended.done():
            request.parked()

    def _forget(self, request: RouterRequest) -> None:
        del self._requests[request.key]
        self._unpin(request)
        if request.started:
            self._mean_output += LENGTH_WEIGHT * (request.mean_output - self._mean_output)
        for engine_id in request.engine_ids:
            self._by_engine_id.pop(engine_id, None)
        if request.trace is not None:
            request.trace.end()

    def _trace(self, message: pb.Submit, received: float) -> AnswerTrace | None:
        tracing = self._context.tracing
        if tracing is None or not message.traceparent:
            return None
        about: dict[str, Value] = {"cpd.request_id": message.trace_id, "cpd.attempt": message.attempt}
        span = tracing.begin("answer", received, {"traceparent": message.traceparent}, about)
        return AnswerTrace(span, received) if span is not None else None

    def _unpin(self, request: RouterRequest) -> None:
        pages, request.pinned = request.pinned, []
        self._pages.unpin(pages)


def _park_all(engine: Engine, engine_ids: Collection[str]) -> list[int] | None:
    """Parks a request under all its names. Returns the pins; None if the engine knows none of the names."""
    parked = [pages for engine_id in engine_ids if (pages := engine.park(engine_id)) is not None]
    return [page for pages in parked for page in pages] if parked else None


def _abort_all(engine: Engine, engine_ids: Collection[str], choices: Collection[int]) -> None:
    for engine_id in engine_ids:
        engine.abort(engine_id, list(choices))


def _refuse(session: RouterSession, message: pb.Submit, kind: pb.Refusal.Kind.ValueType, reason: str) -> None:
    session.refuse(pb.Refusal(request=message.request, attempt=message.attempt, kind=kind, message=reason))


def _refuse_if_failed(request: RouterRequest, added: "asyncio.Future[None]") -> None:
    if (error := added.exception()) is not None:
        request.refuse_for(error)

"""The decode worker's part of a worker: answers requests, by itself or with the help of others, and helps them."""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection
from functools import partial

from cpd.common.errors import QueueFullError
from cpd.rpc import cpd_pb2 as pb
from decode_worker.landing_queue import ReservationQueue
from decode_worker.live import Key, LiveRequest
from decode_worker.remote_prefill import Fill
from decode_worker.route import Route, Routes, add_all
from decode_worker.served_prefix import ServedPrefix
from engine.engine import Engine
from engine.types import StepOutput
from worker.convert import InvalidRequestError, request_from_wire
from worker.delivery import Outlet, Traffic
from worker.engine_bridge import EngineDiedError, Update
from worker.fills import FillServer, Send, Wire
from worker.node import EXIT_RESTART, Node
from worker.peers import Peers
from worker.sessions import Session

log = logging.getLogger(__name__)

MAX_QUARANTINED = 0.2
"""Share of the pool; a worker that keeps more for `fill_progress_s` drains and starts anew with another pool.

A moment of it is nothing special: each fill that is cancelled in the middle of a page leaves some.
"""


class DecodeService:
    """See `worker.service.Service`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._numbers = itertools.count(1)
        self._live: dict[Key, LiveRequest] = {}
        self._by_engine_id: dict[str, LiveRequest] = {}
        self._routes: set[asyncio.Task[None]] = set()
        self._fills: dict[Fill, asyncio.Task[None]] = {}
        self._outcomes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._restart: asyncio.TimerHandle | None = None
        self._peers = Peers(node.transport)
        self._outlet = Outlet(node.engine, node.memory, Traffic())
        self._server = FillServer(node, self._serve_prefix)
        self._shared = Routes(
            node=node,
            reservations=ReservationQueue(node.engine),
            filling={},
            known_as=self._by_engine_id.__setitem__,
            start=self._start_fill,
            outcomes=self._outcomes,
            failures=self._failures,
        )

    @property
    def busy(self) -> bool:
        """Whether a request or another worker's fill is not finished yet. Pages in quarantine keep nobody busy."""
        return bool(self._live or self._server.fills)

    # ---- what the engine brings ----

    def hook(self, engine: Engine, output: StepOutput | None) -> None:
        """Nothing to be done on the engine thread."""

    def update(self, update: Update) -> None:
        """Sends a step's tokens; all of one router go into one message."""
        if update.output is not None:
            for output in update.output.outputs:
                if live := self._by_engine_id.get(output.request_id):
                    live.send([output])
            for request_id, reason in update.output.failed:
                if live := self._by_engine_id.get(request_id):
                    live.refuse(pb.Refusal.KIND_FAILED, reason)
        if update.stats is not None:
            self._watch_quarantine(update.stats.pages.quarantined)

    def add_load(self, load: pb.Load) -> None:
        """Adds requests that the engine does not know of yet."""
        load.waiting += len(self._routes)
        load.fills.update(self._outcomes)
        if served := self._server.outcomes["completed"]:
            load.fills["prefix_served"] = served
        load.fill_failures.update(self._failures)

    # ---- what routers ask for ----

    def submit(self, session: Session, message: pb.Submit) -> None:
        """Starts answering a request."""
        key = (session.number, message.request, message.attempt)
        if key in self._live:
            log.warning("router %s sent request %d twice", session.router_id, message.request)
            return
        refuse = partial(_refuse, session, message)
        if self._node.lifecycle.draining.is_set():
            refuse(pb.Refusal.KIND_REROUTE, "this worker drains")
            return
        try:
            request = request_from_wire(message, f"request-{next(self._numbers)}", self._node.limits, time.monotonic())
        except InvalidRequestError as error:
            refuse(pb.Refusal.KIND_FAILED, str(error))
            return
        live = LiveRequest(session, message, request)
        self._live[key] = live
        self._by_engine_id[request.id] = live
        live.ended.add_done_callback(lambda _: self._forget(live))
        if message.prefill_candidates or message.HasField("prefix_source"):
            route = Route(live, message, self._shared)
            task = asyncio.create_task(route.run(), name=f"route-{request.id}")
            self._routes.add(task)
            task.add_done_callback(self._route_done)
        else:
            added = self._node.engine.call(lambda engine: add_all(engine, [request], live.closed))
            added.add_done_callback(partial(_refuse_if_failed, live))

    def abort(self, session: Session, message: pb.Abort) -> None:
        """Ends a request or some of its choices; the router hears no more of them."""
        live = self._live.get((session.number, message.request, message.attempt))
        if live is not None:
            self._abort(live, message.choices or list(live.open))

    def session_ended(self, session: Session) -> None:
        """Aborts all requests of `session`."""
        for live in [live for live in self._live.values() if live.session is session]:
            self._abort(live, list(live.open))

    async def fills(self, wire: Wire) -> None:
        """Gives another decode worker what is in the cache."""
        await self._server.serve(wire)

    async def stop(self) -> None:
        """Sends every request elsewhere, and ends the fills of others."""
        for live in list(self._live.values()):
            live.refuse(pb.Refusal.KIND_REROUTE, "this worker stops")
            self._abort(live, [])
        await asyncio.gather(*self._routes)
        for task in self._fills.values():
            task.cancel()
        await self._server.stop()
        await self._peers.close()
        if self._restart is not None:
            self._restart.cancel()

    def _serve_prefix(self, start: pb.FillStart, send: Send) -> ServedPrefix:
        if not start.cache_only:
            raise InvalidRequestError("this worker computes no prompts for others")
        return ServedPrefix(f"prefix-{next(self._numbers)}", start, send, outlet=self._outlet, peers=self._peers)

    def _watch_quarantine(self, pages: int) -> None:
        if pages <= MAX_QUARANTINED * self._node.memory.num_pages:
            if self._restart is not None:
                self._restart.cancel()
                self._restart = None
        elif self._restart is None:
            reason = f"{pages} of {self._node.memory.num_pages} pages stay in quarantine"
            self._restart = asyncio.get_running_loop().call_later(
                self._node.settings.fill_progress_s, self._node.lifecycle.drain, reason, EXIT_RESTART
            )

    def _abort(self, live: LiveRequest, choices: Collection[int]) -> None:
        live.close(choices)
        closed, engine_ids = list(live.closed), list(live.engine_ids)
        # Also a nudge for those who wait on the engine thread for something that this request no longer needs.
        self._node.engine.post(lambda engine: _abort_all(engine, engine_ids, closed))

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.key]
        for engine_id in live.engine_ids:
            self._by_engine_id.pop(engine_id, None)

    def _start_fill(self, fill: Fill) -> None:
        task = asyncio.create_task(fill.run(), name="fill")
        self._fills[fill] = task
        task.add_done_callback(lambda _: self._fills.pop(fill))

    def _route_done(self, task: asyncio.Task[None]) -> None:
        self._routes.discard(task)
        self._node.load_changed()


def _abort_all(engine: Engine, engine_ids: Collection[str], choices: Collection[int]) -> None:
    for engine_id in engine_ids:
        engine.abort(engine_id, list(choices))


def _refuse(session: Session, message: pb.Submit, kind: pb.Refusal.Kind.ValueType, reason: str) -> None:
    session.refuse(pb.Refusal(request=message.request, attempt=message.attempt, kind=kind, message=reason))


def _refuse_if_failed(live: LiveRequest, added: "asyncio.Future[None]") -> None:
    match added.exception():
        case QueueFullError() as error:
            live.refuse_queue_full(error)
        case EngineDiedError() as error:
            live.refuse(pb.Refusal.KIND_REROUTE, str(error))
        case BaseException() as error:
            live.refuse(pb.Refusal.KIND_FAILED, str(error))

"""The prefill worker's part of a worker: serves fills, and sessions that only show its cache and load."""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc

from cpd.blocks import blocks_for
from cpd.perfmodel import Work
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import StepOutput
from prefill_worker.fill import Chunk, Fill, PagesToPush, Traffic, refusal
from prefill_worker.peers import Peers
from prefill_worker.queue import FillQueue
from worker.convert import InvalidRequestError, request_from_wire
from worker.engine_bridge import Update
from worker.node import Node
from worker.sessions import Session

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SLACK_BUDGETS = 2
"""A fill may start when less than this many step budgets are left to compute."""


class PrefillService:
    """See `worker.service.Service`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._peers = Peers(node.transport)
        self._queue = FillQueue(
            max_tokens=node.settings.max_queue_tokens,
            slack_tokens=SLACK_BUDGETS * node.colocation.max_tokens,
            early_pages=node.memory.num_pages - blocks_for(node.limits.max_model_len),
            predicted_s=lambda tokens: node.colocation.prefill_ms(Work.prefill(tokens), Work()) / 1000,
        )
        self._traffic = Traffic()
        self._numbers = itertools.count(1)
        self._fills: dict[str, tuple[Fill, asyncio.Task[None]]] = {}
        self._outcomes: Counter[str] = Counter()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="fill-heartbeats")
        self._to_push: dict[str, PagesToPush] = {}  # the engine thread's
        self._chunks: deque[tuple[str, Chunk]] = deque()  # from the engine thread to the event loop

    @property
    def busy(self) -> bool:
        """Whether a fill is not finished yet."""
        return bool(self._fills)

    def hook(self, engine: Engine, output: StepOutput | None) -> None:
        """Pins what a step finished, before the engine can release it."""
        if output is None:
            return
        for computed in output.computed:
            record = self._to_push.get(computed.request_id)
            if record is not None:
                self._chunks.append((computed.request_id, record.take(engine, computed)))
                if record.complete:
                    del self._to_push[computed.request_id]
        for request_id, _ in output.failed:
            self._to_push.pop(request_id, None)

    def update(self, update: Update) -> None:
        """First tokens go out before pages."""
        if update.output is None:
            return
        for output in update.output.outputs:
            if output.request_id in self._fills:
                self._fills[output.request_id][0].take_output(output)
        while self._chunks:
            request_id, chunk = self._chunks.popleft()
            if request_id in self._fills:
                self._fills[request_id][0].push(chunk)
            else:
                self._node.engine.post(partial(_unpin, chunk.pages))
        for request_id, reason in update.output.failed:
            if request_id in self._fills:
                self._fills[request_id][0].stop(reason)

    def add_load(self, load: pb.Load) -> None:
        """Adds fills that the engine does not know of yet."""
        queue = self._queue
        work = queue.waiting_work
        load.waiting += work.seqs
        load.waiting_tokens += work.tokens
        load.queued_tokens += queue.waiting_tokens
        load.prefill_ms += self._node.colocation.prefill_ms(work, Work())
        load.fills.update(self._outcomes)

    def submit(self, session: Session, message: pb.Submit) -> None:
        """A prefill worker answers no requests."""
        session.refuse(
            pb.Refusal(
                request=message.request,
                attempt=message.attempt,
                kind=pb.Refusal.KIND_REROUTE,
                message="this is a prefill worker: it does not decode",
            )
        )

    def abort(self, session: Session, message: pb.Abort) -> None:
        """Nothing to abort: every request was refused."""

    def session_ended(self, session: Session) -> None:
        """Fills do not belong to sessions."""

    async def fill(self, requests: AsyncIterator[pb.FillRequest], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serves one Fill call; the fill itself outlives a broken stream until nothing is in flight."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("kind") != "start":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a fill starts with a FillStart")
        try:
            fill = self._accept(first.start)
        except InvalidRequestError as error:
            await context.write(refusal(str(error)))
            return
        reader = asyncio.create_task(_read(requests, fill), name=f"{fill.request.id}-reader")
        try:
            while (event := await fill.events.get()) is not None:
                await context.write(event)
        finally:
            fill.stop("the decode worker is gone", cancelled=True)
            reader.cancel()

    async def stop(self) -> None:
        """Ends every fill and waits until nothing is in flight."""
        self._heartbeats.cancel()
        for fill, _ in self._fills.values():
            fill.stop("the prefill worker stops")
        await asyncio.gather(*(task for _, task in self._fills.values()))
        await self._peers.close()

    def _accept(self, start: pb.FillStart) -> Fill:
        node = self._node
        if node.lifecycle.draining.is_set():
            raise InvalidRequestError("this prefill worker drains")
        if start.fingerprint != node.fingerprint:
            raise InvalidRequestError(
                f"decode worker {start.decode_worker_id} and prefill worker {node.worker_id} differ in weights, dtype "
                "or block size: their pages cannot be exchanged"
            )
        if start.transport != node.transport.name:
            raise InvalidRequestError(
                f"decode worker {start.decode_worker_id} moves pages over {start.transport}, prefill worker "
                f"{node.worker_id} over {node.transport.name}"
            )
        request = request_from_wire(
            start, f"fill-{next(self._numbers)}", node.limits, time.monotonic(), prefill_only=True
        )
        fill = Fill(
            request,
            start,
            engine=node.engine,
            peers=self._peers,
            queue=self._queue,
            traffic=self._traffic,
            to_push=self._to_push,
            memory=node.memory,
        )
        task = asyncio.create_task(fill.run(), name=request.id)
        self._fills[request.id] = fill, task
        task.add_done_callback(lambda _: self._ended(fill))
        node.load_changed()
        return fill

    def _ended(self, fill: Fill) -> None:
        del self._fills[fill.request.id]
        self._outcomes[fill.outcome] += 1
        self._node.load_changed()

    async def _send_heartbeats(self) -> None:
        """What the engine has answered since the last one says that it works: when it hangs, only the process runs."""
        answer: asyncio.Future[None] | None = None
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            works = answer is not None and answer.done() and answer.exception() is None
            for fill, _ in list(self._fills.values()):
                fill.heartbeat(works=works)
            if answer is None or answer.done():
                answer = self._node.engine.call(lambda engine: None) if self._fills else None


def _unpin(pages: Sequence[int], engine: Engine) -> None:
    engine.unpin(pages)


async def _read(requests: AsyncIterator[pb.FillRequest], fill: Fill) -> None:
    """Hands the decode worker's messages to the fill; the end of them cancels it."""
    try:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "landing" if not fill.landing.done():
                    fill.landing.set_result(message.landing)
                case "cancel":
                    fill.stop("cancelled", cancelled=True)
                case other:
                    fill.stop(f"unexpected message {other!r} in a fill")
    finally:
        fill.stop("the decode worker is gone", cancelled=True)

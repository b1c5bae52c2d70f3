"""The prefill worker's part of a worker: serves fills, and sessions that only show its cache and load."""

import itertools
import time
from collections import deque

from cpd.common.blocks import blocks_for
from cpd.performance.model import Work
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.scheduling.fair_queue import passed
from engine.types import StepOutput
from prefill_worker.job_queue import FillQueue
from prefill_worker.prefill_job import Chunk, Fill, PagesToPush, State
from worker.convert import request_from_wire
from worker.delivery import Outlet, Traffic
from worker.engine_bridge import Update
from worker.fills import FillServer, Send, ServedFill, Wire
from worker.node import Node
from worker.peers import Peers
from worker.sessions import Session

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
            predicted_s=lambda tokens: self._prefill_ms(Work.prefill(tokens)) / 1000,
        )
        self._outlet = Outlet(node.engine, node.memory, Traffic())
        self._numbers = itertools.count(1)
        self._fills: dict[str, Fill] = {}
        self._server = FillServer(node, self._make, self._ended)
        self._to_push: dict[str, PagesToPush] = {}  # the engine thread's
        self._chunks: deque[tuple[str, Chunk]] = deque()  # of steps whose first tokens come next

    @property
    def busy(self) -> bool:
        """Whether a fill is not finished yet."""
        return bool(self._fills)

    def hook(self, engine: Engine, output: StepOutput | None) -> None:
        """Pins what a step finished, before the engine can release it."""
        if output is None:
            return
        chunks = []
        for computed in output.computed:
            record = self._to_push.get(computed.request_id)
            if record is not None:
                chunks.append((computed.request_id, record.take(engine, computed)))
                if record.complete:
                    del self._to_push[computed.request_id]
        self._node.engine.deliver(lambda: self._chunks.extend(chunks))
        for request_id, _ in output.failed:
            self._to_push.pop(request_id, None)

    def update(self, update: Update) -> None:
        """First tokens go out before pages."""
        if update.output is None:
            return
        for output in update.output.outputs:
            if output.request_id in self._fills:
                self._fills[output.request_id].take_output(output)
        while self._chunks:
            request_id, chunk = self._chunks.popleft()
            if request_id in self._fills:
                self._fills[request_id].push(chunk)
            else:
                self._outlet.unpin(chunk.pages)
        for request_id, reason in update.output.failed:
            if request_id in self._fills:
                self._fills[request_id].stop(reason)

    def add_load(self, load: pb.Load) -> None:
        """Adds fills that the engine does not know of yet."""
        queue = self._queue
        work = queue.waiting_work
        load.waiting += work.seqs
        load.waiting_tokens += work.tokens
        load.queued_tokens += queue.waiting_tokens
        queue_ms = self._prefill_ms(work)
        load.overdue_ms += passed(queue_ms, self._prefill_ms(queue.late_work(time.monotonic() + load.prefill_ms / 1e3)))
        load.prefill_ms += queue_ms
        waiting = (fill for fill in self._fills.values() if fill.state in (State.QUEUED, State.READY))
        load.awaiting_first_token.extend(fill.request.number for fill in waiting)
        load.fills.update(self._server.outcomes)

    def _prefill_ms(self, work: Work) -> float:
        return self._node.colocation.prefill_ms(work, Work())

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

    async def fills(self, wire: Wire) -> None:
        """Computes prompts for a decode worker."""
        await self._server.serve(wire)

    async def stop(self) -> None:
        """Ends every fill and waits until nothing is in flight."""
        await self._server.stop()
        await self._peers.close()

    def _make(self, start: pb.FillStart, send: Send) -> Fill:
        node = self._node
        request = request_from_wire(
            start, f"fill-{next(self._numbers)}", node.limits, time.monotonic(), prefill_only=True
        )
        fill = Fill(
            request, start, send, outlet=self._outlet, peers=self._peers, queue=self._queue, to_push=self._to_push
        )
        self._fills[request.id] = fill
        return fill

    def _ended(self, fill: ServedFill) -> None:
        del self._fills[fill.name]

"""The prefill part of a worker: computes prompts for other workers."""

import itertools
import time
from collections import Counter, deque

from cpd.common.blocks import blocks_for
from cpd.performance.model import Work
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.scheduling.fair_queue import overdue_part
from engine.types import StepOutput
from prefill_worker.job_queue import JobQueue
from prefill_worker.prefill_job import FinishedPages, PagesToSend, PrefillJob, PrefillJobState
from worker.async_engine import Update
from worker.context import WorkerContext
from worker.page_sender import SourcePool
from worker.pool_connections import PoolConnections
from worker.prefill_server import Send, ServedPrefill
from worker.wire_format import request_from_wire

SLACK_BUDGETS = 2
"""A job may start when fewer than this many step budgets of tokens are left to compute."""


class PrefillService:
    """See `worker.service.PrefillPart`."""

    def __init__(self, context: WorkerContext, pages: SourcePool, pools: PoolConnections) -> None:
        self._context = context
        self._pages, self._pools = pages, pools
        self._queue = JobQueue(
            max_tokens=context.settings.max_queue_tokens,
            max_wait_s=context.settings.max_wait_s,
            slack_tokens=SLACK_BUDGETS * context.colocation.max_tokens,
            early_pages=context.memory.num_pages - blocks_for(context.limits.max_model_len),
            predicted_s=lambda tokens: self._prefill_ms(Work.prefill(tokens)) / 1000,
        )
        self._numbers = itertools.count(1)
        self._jobs: dict[str, PrefillJob] = {}
        self._outcomes: Counter[str] = Counter()
        self._to_send: dict[str, PagesToSend] = {}  # only the engine thread uses it
        self._finished: deque[tuple[str, FinishedPages]] = deque()  # of steps whose Update comes next

    @property
    def busy(self) -> bool:
        """True while a job has not ended."""
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of jobs that the engine does not have yet."""
        return self._queue.waiting_work.seqs

    def after_pass(self, engine: Engine, output: StepOutput | None) -> None:
        """Pins the pages that a step has finished, before the engine can release them."""
        if output is None:
            return
        finished = []
        for computed in output.computed:
            to_send = self._to_send.get(computed.request_id)
            if to_send is not None:
                finished.append((computed.request_id, to_send.take(engine, computed)))
                if to_send.complete:
                    del self._to_send[computed.request_id]
        self._context.engine.deliver(lambda: self._finished.extend(finished))
        for request_id, _ in output.failed:
            self._to_send.pop(request_id, None)

    def update(self, update: Update) -> None:
        """Sends first tokens, then pages."""
        if update.output is None:
            return
        for output in update.output.outputs:
            if output.request_id in self._jobs:
                self._jobs[output.request_id].take_output(output)
        while self._finished:
            request_id, finished = self._finished.popleft()
            if request_id in self._jobs:
                self._jobs[request_id].take_pages(finished)
            else:
                self._pages.unpin(finished.pages)
        for request_id, reason in update.output.failed:
            if request_id in self._jobs:
                self._jobs[request_id].stop(reason)

    def add_load(self, load: pb.Load) -> None:
        """Adds the jobs that the engine does not know yet."""
        queue = self._queue
        work = queue.waiting_work
        load.waiting += self.waiting
        load.waiting_tokens += work.tokens
        load.queued_tokens += queue.waiting_tokens
        queue_ms = self._prefill_ms(work)
        late_ms = self._prefill_ms(queue.late_work(time.monotonic() + load.prefill_ms / 1e3))
        load.overdue_ms += overdue_part(queue_ms, late_ms)
        load.prefill_ms += queue_ms
        waiting = (PrefillJobState.QUEUED, PrefillJobState.READY)
        load.awaiting_first_token.extend(job.request.number for job in self._jobs.values() if job.state in waiting)
        for outcome, count in self._outcomes.items():
            load.remote_prefills[outcome] += count

    def hand_over(self) -> None:
        """Ends the jobs that are not granted yet: their decode workers try the next prefill worker."""
        for job in list(self._jobs.values()):
            if job.state in (PrefillJobState.CONNECTING, PrefillJobState.QUEUED):
                job.stop("this worker drains")

    def make(self, start: pb.PrefillStart, send: Send) -> PrefillJob:
        """Makes a job. Raises InvalidRequestError."""
        name = f"prefill-{next(self._numbers)}"
        request = request_from_wire(start, name, self._context.limits, time.monotonic(), prefill_only=True)
        job = PrefillJob(
            request,
            start,
            send,
            source=self._pages,
            pools=self._pools,
            queue=self._queue,
            grammars=self._context.grammars,
            to_send=self._to_send,
        )
        self._jobs[request.id] = job
        return job

    def ended(self, job: ServedPrefill) -> None:
        """Forgets a job that has ended."""
        del self._jobs[job.name]
        self._outcomes[job.outcome] += 1

    def _prefill_ms(self, work: Work) -> float:
        return self._context.colocation.prefill_ms(work, Work())

"""The bounded queue of prefill jobs, in the order of `engine.scheduling.fair_queue`.

    WAITING ──granted──▶ in the engine ──computed and landed, or given up──▶ removed
       └────────────────given up───────────────────────────────────────────▶ removed

A job is granted shortly before the engine runs out of work, so that decode workers reserve pages for a short time only.
It may then be computed before its landing is known, so that nothing waits for a decode worker in the middle of a step.
A decode worker that answers slowly delays only its own jobs.

Pages that wait for a landing must never stop a job that has one: a decode worker may wait for exactly that job, and the
two would wait for each other. So their number leaves room for the longest prompt.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from cpd.common.blocks import blocks_for
from cpd.performance.model import Work
from engine.scheduling.fair_queue import FairQueue, Terms
from engine.scheduling.queue_limit import QueueLimit


@dataclass(eq=False, slots=True)
class QueuedJob:
    """A job in the queue, until it is removed.

    Attributes:
        decode_worker: The worker that wants the pages.
        terms: The terms on which it waits.
        tokens_left: Tokens still to compute, as far as known.
        granted: Set when the job may start.
        landed: The decode worker has named the landing.
        early: The job may be computed before that; known when it is granted.
    """

    decode_worker: str
    terms: Terms
    tokens_left: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    landed: bool = False
    early: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.terms.tokens

    @property
    def work(self) -> Work:
        """The work still to do, as far as known."""
        return Work.prefill(self.tokens_left, self.tokens - self.tokens_left)


class JobQueue:
    """The jobs of a prefill worker that still need its engine, or a landing.

    Times are on the clock of the jobs' deadlines, in seconds.

    Args:
        max_tokens: Most tokens that may wait (`engine.scheduling.queue_limit` has the rule).
        slack_tokens: A job is granted when fewer tokens than this are left to compute, and fewer than this of the same
            decode worker have not landed.
        max_wait_s: Longest time that they should wait.
        early_pages: Most pages that may wait for a landing.
        predicted_s: Predicts the time to compute this many tokens.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        slack_tokens: int,
        early_pages: int,
        max_wait_s: float = inf,
        predicted_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self._max_tokens = max_tokens
        self._slack_tokens = slack_tokens
        self._early_pages = early_pages
        self._waiting = FairQueue[QueuedJob]()
        self._limit = QueueLimit(predicted_s, max_wait_s=max_wait_s)
        self._predicted_s = predicted_s
        self._granted: list[QueuedJob] = []
        self._waiting_work = Work()

    @property
    def waiting(self) -> list[QueuedJob]:
        """Jobs that are not granted yet, in the order of arrival."""
        return list(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting jobs."""
        return self._limit.tokens

    @property
    def waiting_work(self) -> Work:
        """Work of the waiting jobs, as far as known."""
        return self._waiting_work

    def late_work(self, now: float) -> Work:
        """Returns the work of the waiting jobs that are given up, for now, if the first one starts at `now`."""
        return Work.total(job.work for job in self._waiting.late(now))

    def add(self, decode_worker: str, terms: Terms, now: float) -> QueuedJob:
        """Queues a job.

        Raises:
            QueueFullError: Too many tokens are waiting.
        """
        self._limit.check(terms.tenant, terms.tokens, self._max_tokens, now)
        job = QueuedJob(decode_worker, terms, terms.tokens)
        self._waiting.push(job, terms, self._predicted_s(terms.tokens))
        self._limit.add(terms.tenant, terms.tokens, now)
        self._waiting_work += job.work
        self._grant(now)
        return job

    def set_tokens_left(self, job: QueuedJob, tokens_left: int, now: float) -> None:
        """Records how much of a job is still to compute: known from the cache, then after each chunk."""
        if job in self._waiting:
            self._waiting_work -= job.work
        job.tokens_left = tokens_left
        if job in self._waiting:
            self._waiting_work += job.work
            self._waiting.update(job, self._predicted_s(tokens_left))
        self._grant(now)

    def set_landed(self, job: QueuedJob, now: float) -> None:
        """Records that the decode worker has named the landing."""
        job.landed = True
        self._grant(now)

    def remove(self, job: QueuedJob, now: float) -> None:
        """Removes a job that needs neither the engine nor a landing any more. Idempotent."""
        if job in self._granted:
            self._granted.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._waiting_work -= job.work
            self._limit.remove(job.terms.tenant, job.tokens)
        self._grant(now)

    def _grant(self, now: float) -> None:
        left = sum(job.tokens_left for job in self._granted if job.early or job.landed)
        while left < self._slack_tokens and (job := self._next(now)) is not None:
            self._waiting.take(job)
            self._waiting_work -= job.work
            self._limit.take(job.terms.tenant, job.tokens, now)
            early_pages = sum(blocks_for(other.tokens) for other in self._granted if other.early and not other.landed)
            job.early = early_pages + blocks_for(job.tokens) <= self._early_pages
            left += job.tokens_left if job.early else 0
            self._granted.append(job)
            if not job.granted.done():
                job.granted.set_result(None)

    def _next(self, now: float) -> QueuedJob | None:
        """Returns the first job whose decode worker has few enough tokens that have not landed."""
        unlanded: Counter[str] = Counter()
        for job in self._granted:
            unlanded[job.decode_worker] += 0 if job.landed else job.tokens
        first = self._waiting.first(now)
        candidates = chain([first] if first else [], self._waiting.out_of_turn(now))
        return next((job for job in candidates if unlanded[job.decode_worker] < self._slack_tokens), None)

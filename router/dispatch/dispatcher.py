"""The life of a request between router and workers.

A request is one prompt with `n` choices. Its attempts (attempts.py) go through these states:

    placed -> running -> done                 each choice ends with its finish reason, or when its client stops it
       ^         |
       |         +--- queue full              -> another worker; if none is left: 429 or 503, or parked after a replay
       +---------+--- rerouted                -> another worker or the same, without the prefill workers that failed
       |         +--- worker lost             -> replayed: prompt and output so far, one attempt per choice
       +---------+--- failed                  -> another worker, once and before the first token; else the request fails

An attempt that ran before and finds no worker is parked: it waits up to PARK_S for one. Nothing else waits here. A
token once emitted is never sampled again; a replay continues after it.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from random import Random

from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError
from router.dispatch.attempts import Attempt, RequestRoute, RoutedRequest
from router.dispatch.loop_slices import LoopSlices
from router.dispatch.placer import Placer
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import Workers
from router.errors import ApiError, failed, one_line, too_many, unavailable
from router.metrics import Metrics
from router.placement.costs import PolicySettings
from router.placement.decisions import Decisions

log = logging.getLogger(__name__)

PARK_S = 30.0
"""How long a request that lost its worker waits for another one."""

MAX_FAILURES = 1
"""A request that fails on more workers than this fails for good: it would fail on all of them."""

MAX_LOSSES = 4
"""A request that loses more workers than this fails: it may be what crashes them."""

MAX_QUEUE_FULL = 3
"""A new request is refused once the queues of this many workers were full; they were the most promising ones."""

IMMEDIATE_REROUTES = 3
"""A request rerouted more often than this is placed again only after a pause."""

RETRY_S = 1.0
"""When to try again if a worker did not say."""

MAX_RETRY_S = 600.0
"""Upper bound on the retry time that a worker suggests."""


class Dispatcher:
    """Sends requests to workers and hands their tokens on. It is the listener of every worker session.

    Args:
        policy: The operator's settings for placements.
        rng: Decides between equally good workers.

    Attributes:
        decisions: Where recent requests went, and how that worked out.
    """

    def __init__(self, workers: Workers, metrics: Metrics, policy: PolicySettings, *, rng: Random) -> None:
        self._metrics = metrics
        self._placer = Placer(workers, policy, rng)
        self.decisions = Decisions()
        self._ids = itertools.count(rng.randrange(1, 1 << 60))  # load reports show them to all routers
        self._attempts: dict[int, Attempt] = {}
        self._parked: set[Attempt] = set()
        self._slices = LoopSlices(self._on_output)

    # ---- called by consumers ----

    def start(self, request: RoutedRequest) -> None:
        """Places a new request.

        Raises:
            ApiError: No worker is live.
        """
        attempt = self._add_attempt(request, set(range(request.n)))
        if not self._place(attempt):
            self._remove(attempt, "not placed")
            raise unavailable("No worker is ready to serve the model.", RETRY_S)

    def cancel(self, request: RoutedRequest) -> None:
        """Ends a request on all its workers."""
        for attempt in list(request.attempts):
            if attempt.session is not None:
                attempt.session.abort(pb.Abort(request=attempt.id, attempt=attempt.number))
            self._remove(attempt, "cancelled")

    def close(self) -> None:
        """The router stops: all running requests fail."""
        for request in {attempt.request for attempt in self._attempts.values()}:
            self._fail(request, unavailable("The server is shutting down; try again.", RETRY_S))

    # ---- called by sessions ----

    def ready(self, session: WorkerSession) -> None:
        """A worker is live: parked attempts may go to it."""
        for attempt in list(self._parked):
            self._retry_part(attempt, RETRY_S)

    def step(self, session: WorkerSession, step: pb.StepOutput) -> None:
        """Hands on the tokens of one engine step: first ones now, others in their slice of the loop."""
        for output in step.outputs:
            attempt = self._attempts.get(output.request)
            if attempt is not None and attempt.request.started:
                self._slices.add((session, output), len(output.token_ids))
            else:
                self._on_output((session, output))

    def refusal(self, session: WorkerSession, refusal: pb.Refusal) -> None:
        """A worker gives an attempt back."""
        self._slices.flush()
        attempt = self._attempts.get(refusal.request)
        if attempt is None or attempt.session is not session or attempt.number != refusal.attempt:
            return
        retry_after_s, message, reason = _retry_after_s(refusal), one_line(refusal.message), _reason(refusal)
        attempt.detach(f"{reason}: {message}")
        self._metrics.refusals(reason).inc()
        attempt.refused_by.add(session.id)
        if refusal.kind == pb.Refusal.KIND_QUEUE_FULL:
            attempt.queue_full.append(refusal)
            if len(attempt.queue_full) < MAX_QUEUE_FULL or attempt.losses or attempt.request.started:
                self._retry(attempt, retry_after_s)
            else:
                self._fail(attempt.request, _queues_full(attempt.queue_full, retry_after_s))
        elif refusal.kind == pb.Refusal.KIND_REROUTE:
            log.warning("request %s is rerouted: %s", attempt.request.trace_id, message)
            attempt.reroutes += 1
            attempt.failed_prefill.update(refusal.failed_prefill_workers)
            # the same worker may take it at once, unless it keeps rerouting: then it drains
            self._retry(attempt, 0 if attempt.reroutes <= IMMEDIATE_REROUTES else retry_after_s)
        else:
            log.error("worker %s failed request %s: %s", session.id, attempt.request.trace_id, message)
            attempt.failures += 1
            if attempt.request.started or attempt.failures > MAX_FAILURES or not self._place(attempt):
                self._fail(attempt.request, failed(f"The worker could not finish the request: {message}"))

    def lost(self, session: WorkerSession) -> None:
        """A session ended: its attempts are replayed on other workers."""
        self._slices.flush()
        for attempt in [attempt for attempt in self._attempts.values() if attempt.session is session]:
            if attempt.id not in self._attempts:
                continue  # its request failed together with another attempt
            attempt.detach("worker lost")
            self._metrics.replays.inc()
            attempt.losses += 1
            attempt.lost_by.add(session.id)
            if attempt.losses > MAX_LOSSES:
                message = f"{attempt.losses} workers were lost while they ran this request."
                self._fail(attempt.request, failed(message))
                continue
            log.warning("request %s is replayed: worker %s is lost", attempt.request.trace_id, session.id)
            attempt.refused_by.clear()
            self._retry(attempt, RETRY_S)

    # ---- output ----

    def _on_output(self, sent: tuple[WorkerSession, pb.Output]) -> None:
        session, output = sent
        attempt = self._attempts.get(output.request)
        if attempt is None or attempt.session is not session or attempt.number != output.attempt:
            return  # the request was cancelled or replayed in the meantime
        if session.failed:
            return
        try:
            if output.choice in attempt.choices:
                self._hand_on(attempt, session, output)
            elif output.choice >= attempt.request.n:
                raise ProtocolError(f"choice {output.choice} of a request that has {attempt.request.n}")
        except ProtocolError as error:
            session.fail(error)
        except Exception:
            log.exception("request %s: its output could not be handled", attempt.request.trace_id)
            self._fail(attempt.request, failed("The output could not be processed."))

    def _hand_on(self, attempt: Attempt, session: WorkerSession, output: pb.Output) -> None:
        attempt.check(output)
        request, choice, prefilled = attempt.request, output.choice, output.prefilled
        loop = asyncio.get_running_loop()
        attempt.on_output(choice, prefilled, loop.time())
        token_ids = output.token_ids
        request.outputs[choice].extend(token_ids)
        wants_more = request.consumer.output(choice, token_ids, output.logprobs, output.finish)
        if not request.started:
            request.started = True
            request.consumer.started(RequestRoute(session.id, prefilled.prefill_worker, prefilled.cached_tokens))
            loop.call_soon(self._count_first, request, prefilled.queue_ms)  # after the tokens are on their way
        if output.finish != pb.FINISH_NONE:
            self._choice_done(attempt, choice)
        elif not wants_more:
            session.abort(pb.Abort(request=attempt.id, attempt=attempt.number, choices=[choice]))
            self._choice_done(attempt, choice)

    def _count_first(self, request: RoutedRequest, queue_ms: float) -> None:
        self._metrics.queue(request.tenant).observe(queue_ms / 1e3)
        self._metrics.tenant_tokens(request.tenant).inc(request.prompt_len)

    def _choice_done(self, attempt: Attempt, choice: int) -> None:
        attempt.choice_done(choice)
        if not attempt.choices:
            self._remove(attempt, "finished")

    # ---- placing and retrying ----

    def _place(self, attempt: Attempt) -> bool:
        """Sends the attempt to the best worker. Returns False if there is none."""
        now = asyncio.get_running_loop().time()
        placed = self._placer.place(attempt, now)
        if placed is None:
            return False
        placed.decode.submit(placed.submit)  # first, so that the worker begins while the router keeps its books
        placement = placed.placement
        self.decisions.add(attempt.attach(placement, placed.decode, placed.prefill, now))
        self._metrics.placements(placement.route, "yes" if placement.replicated else "no").inc()
        return True

    def _retry(self, attempt: Attempt, retry_after_s: float) -> None:
        """Places an attempt again, split by choice if it has output; parks or refuses what no worker takes."""
        for part in self._split(attempt):
            self._retry_part(part, retry_after_s)

    def _retry_part(self, attempt: Attempt, retry_after_s: float) -> None:
        if attempt.id not in self._attempts:
            return  # its request failed together with another attempt
        self._unpark(attempt)
        if self._place(attempt):
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not (attempt.losses or attempt.request.started) and (attempt.queue_full or not attempt.reroutes):
            self._fail(attempt.request, _queues_full(attempt.queue_full, retry_after_s))
            return
        if attempt.deadline is None:
            attempt.deadline = now + PARK_S
        if now >= attempt.deadline:
            message = f"No worker could go on with the request within {PARK_S:g} s."
            self._fail(attempt.request, unavailable(message, retry_after_s))
            return
        attempt.refused_by.clear()
        attempt.queue_full.clear()
        self._parked.add(attempt)
        wait_s = min(retry_after_s, attempt.deadline - now)
        attempt.timer = loop.call_later(wait_s, self._retry_part, attempt, RETRY_S)

    def _split(self, attempt: Attempt) -> list[Attempt]:
        """One attempt per choice if the request has output; else the attempt as it is."""
        if len(attempt.choices) == 1 or not attempt.request.started:
            return [attempt]
        self._remove(attempt, "split")
        return [self._add_attempt(attempt.request, {choice}, attempt) for choice in sorted(attempt.choices)]

    def _add_attempt(self, request: RoutedRequest, choices: set[int], origin: Attempt | None = None) -> Attempt:
        attempt = Attempt(next(self._ids), request, choices)
        if origin is not None:
            attempt.number, attempt.deadline = origin.number, origin.deadline
            attempt.losses, attempt.lost_by = origin.losses, set(origin.lost_by)
            attempt.reroutes = origin.reroutes
            attempt.failed_prefill = set(origin.failed_prefill)
        self._attempts[attempt.id] = attempt
        request.attempts.add(attempt)
        return attempt

    def _fail(self, request: RoutedRequest, error: ApiError) -> None:
        self.cancel(request)
        request.consumer.failed(error)

    def _unpark(self, attempt: Attempt) -> None:
        self._parked.discard(attempt)
        if attempt.timer is not None:
            attempt.timer.cancel()
            attempt.timer = None

    def _remove(self, attempt: Attempt, outcome: str) -> None:
        self._unpark(attempt)
        attempt.detach(outcome)
        self._attempts.pop(attempt.id, None)
        attempt.request.attempts.discard(attempt)


def _reason(refusal: pb.Refusal) -> str:
    match refusal.kind:
        case pb.Refusal.KIND_QUEUE_FULL:
            return "over_share" if refusal.over_share else "queue_full"
        case pb.Refusal.KIND_REROUTE:
            return "reroute"
    return "failed"


def _retry_after_s(refusal: pb.Refusal) -> float:
    return min(refusal.retry_after_ms / 1e3, MAX_RETRY_S) or RETRY_S


def _queues_full(refusals: Sequence[pb.Refusal], retry_after_s: float) -> ApiError:
    """The error when no worker's queue has room: 429 if only this tenant's share is used up, else 503."""
    soonest_s = min(map(_retry_after_s, refusals), default=retry_after_s)
    if refusals and all(refusal.over_share for refusal in refusals):
        return too_many("Too many of your requests wait already; try again later.", soonest_s)
    return unavailable("All workers' queues are full; try again later.", soonest_s, code="queue_full")

"""The life of a request between router and workers.

A request is one prompt with `n` choices. It travels in legs: one Submit each, keyed (leg id, attempt).

    placed -> running -> done                 a choice is done with its finish reason, or when the consumer stops it
       ^         |
       |         +--- queue full              -> another worker; none left: 429 or 503, or parked after a replay
       +---------+--- rerouted                -> another worker or this one, without the prefill workers that failed
       |         +--- worker lost             -> replayed: prompt and the tokens so far, a leg for every choice
       +---------+--- failed                  -> another worker, once and before the first token; else the request fails

A leg that was placed before and finds no worker is parked: it waits PARK_S for one. Nothing else waits here. A token
that came is a fact: a replay goes on after it.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from random import Random

from cpd.blocks import TOKEN_BYTES
from cpd.rpc import cpd_pb2 as pb
from router.checks import NonsenseError
from router.costs import PolicySettings, Prompt
from router.errors import ApiError, failed, one_line, too_many, unavailable
from router.history import History
from router.index import Prefixes
from router.legs import Leg, Request, Route
from router.metrics import Metrics
from router.policy import Placement, place
from router.sessions import Session
from router.turns import Turns
from router.workers import Workers

log = logging.getLogger(__name__)

PARK_S = 30.0
"""A request that lost its worker waits this long for another one."""

MOST_FAILURES = 1
"""A new request that more workers failed is one that all of them would."""

MAX_LOSSES = 4
"""A request that lost so many workers may be what ends them: it fails."""

MOST_FULL = 3
"""A new request that so many workers had no room for is refused: they looked the best."""

IMMEDIATE_REROUTES = 3
"""A request that was given back more often than this is not placed again without a pause."""

RETRY_S = 1.0
"""When to try again where a worker did not say."""

MOST_RETRY_S = 600.0
"""No queue takes longer until it has room."""


class Dispatcher:
    """Places requests on workers and hands their tokens on. Listens to every session.

    Args:
        policy: What the operator wants of placements.
        rng: Decides among equally good workers.

    Attributes:
        history: Where requests went, and what became of them.
    """

    def __init__(self, workers: Workers, metrics: Metrics, policy: PolicySettings, *, rng: Random) -> None:
        self._workers = workers
        self._metrics = metrics
        self.history = History()
        self._policy = policy
        self._rng = rng
        self._ids = itertools.count(rng.randrange(1, 1 << 60))  # workers name them to all routers
        self._legs: dict[int, Leg] = {}
        self._parked: set[Leg] = set()
        self._turns = Turns(self._output)

    # ---- for consumers ----

    def start(self, request: Request) -> None:
        """Places a new request.

        Raises:
            ApiError: No worker is live.
        """
        leg = self._add_leg(request, set(range(request.n)))
        if not self._place(leg):
            self._remove(leg, "not placed")
            raise unavailable("No worker is ready to serve the model.", RETRY_S)

    def cancel(self, request: Request) -> None:
        """Nobody wants the rest of the request."""
        for leg in list(request.legs):
            if leg.session is not None:
                leg.session.abort(pb.Abort(request=leg.id, attempt=leg.attempt))
            self._remove(leg, "cancelled")

    def close(self) -> None:
        """The router stops: whatever still runs fails."""
        for request in {leg.request for leg in self._legs.values()}:
            self._fail(request, unavailable("The server is shutting down; try again.", RETRY_S))

    # ---- for sessions ----

    def ready(self, session: Session) -> None:
        """A worker is live: parked requests may find their place."""
        for leg in list(self._parked):
            self._place_part_again(leg, RETRY_S)

    def step(self, session: Session, step: pb.StepOutput) -> None:
        """Hands on the tokens of one engine step: first ones now, others when it is their turn."""
        for output in step.outputs:
            leg = self._legs.get(output.request)
            if leg is not None and leg.request.started:
                self._turns.wait((session, output), len(output.token_ids))
            else:
                self._output((session, output))

    def refusal(self, session: Session, refusal: pb.Refusal) -> None:
        """A worker gives a request back."""
        self._turns.finish()
        leg = self._legs.get(refusal.request)
        if leg is None or leg.session is not session or leg.attempt != refusal.attempt:
            return
        retry_after_s, message = _retry_after_s(refusal), one_line(refusal.message)
        reason = _reason(refusal)
        leg.detach(f"{reason}: {message}")
        self._metrics.refusals(reason).inc()
        leg.refused_by.add(session.id)
        if refusal.kind == pb.Refusal.KIND_QUEUE_FULL:
            leg.full.append(refusal)
            if len(leg.full) < MOST_FULL or leg.losses or leg.request.started:
                self._place_again(leg, retry_after_s)
            else:
                self._fail(leg.request, _queues_full(leg.full, retry_after_s))
        elif refusal.kind == pb.Refusal.KIND_REROUTE:
            log.warning("request %s is placed anew: %s", leg.request.trace_id, message)
            leg.reroutes += 1
            leg.failed_prefill.update(refusal.failed_prefill_workers)
            # the same worker may take it at once, unless it goes on refusing: then it drains
            self._place_again(leg, 0 if leg.reroutes <= IMMEDIATE_REROUTES else retry_after_s)
        else:
            log.error("worker %s failed request %s: %s", session.id, leg.request.trace_id, message)
            leg.failures += 1
            # one worker's trouble need not be another one's
            if leg.request.started or leg.failures > MOST_FAILURES or not self._place(leg):
                self._fail(leg.request, failed(f"The worker could not finish the request: {message}"))

    def lost(self, session: Session) -> None:
        """A session ended: what ran there is replayed elsewhere."""
        self._turns.finish()
        for leg in [leg for leg in self._legs.values() if leg.session is session]:
            if leg.id not in self._legs:
                continue  # its request failed with another leg
            leg.detach("worker lost")
            self._metrics.replays.inc()
            leg.losses += 1
            leg.lost_by.add(session.id)
            if leg.losses > MAX_LOSSES:
                self._fail(leg.request, failed(f"{leg.losses} workers were lost while they ran this request."))
                continue
            log.warning("request %s is replayed: worker %s is lost", leg.request.trace_id, session.id)
            leg.refused_by.clear()
            self._place_again(leg, RETRY_S)

    # ---- inside ----

    def _output(self, sent: tuple[Session, pb.Output]) -> None:
        session, output = sent
        leg = self._legs.get(output.request)
        if leg is None or leg.session is not session or leg.attempt != output.attempt or session.broken_off:
            return  # stopped, cancelled or replayed meanwhile
        try:
            if output.choice in leg.choices:
                self._hand_on(leg, session, output)
            elif output.choice >= leg.request.n:
                raise NonsenseError(f"choice {output.choice} of a request that has {leg.request.n}")
        except NonsenseError as error:
            session.break_off(error)
        except Exception:
            log.exception("request %s: its output could not be handled", leg.request.trace_id)
            self._fail(leg.request, failed("The output could not be processed."))

    def _hand_on(self, leg: Leg, session: Session, output: pb.Output) -> None:
        leg.check(output)
        request, choice, prefilled = leg.request, output.choice, output.prefilled
        loop = asyncio.get_running_loop()
        leg.output(choice, prefilled, loop.time())
        token_ids = output.token_ids
        request.outputs[choice].extend(token_ids)
        wants_more = request.consumer.output(choice, token_ids, output.logprobs, output.finish)
        if not request.started:
            request.started = True
            request.consumer.started(Route(session.id, prefilled.prefill_worker, prefilled.cached_tokens))
            loop.call_soon(self._count_first, request, prefilled.queue_ms)  # when the tokens are on their way
        if output.finish != pb.FINISH_NONE:
            self._choice_done(leg, choice)
        elif not wants_more:
            session.abort(pb.Abort(request=leg.id, attempt=leg.attempt, choices=[choice]))
            self._choice_done(leg, choice)

    def _count_first(self, request: Request, queue_ms: float) -> None:
        self._metrics.queue(request.tenant).observe(queue_ms / 1e3)
        self._metrics.tenant_tokens(request.tenant).inc(request.prompt_len)

    def _place(self, leg: Leg) -> bool:
        """Sends the leg to the best worker; False where there is none."""
        request = leg.request
        if self._workers.fingerprint != request.fingerprint:
            return False
        emitted = request.outputs[min(leg.choices)]
        tokens, hashes = request.after(emitted)
        cached = self._workers.index.cached_prefixes(hashes)
        total, most = len(tokens) // TOKEN_BYTES, request.prompt_len + request.sampling.max_tokens
        now = asyncio.get_running_loop().time()
        placement = place(
            Prompt(total, request.sampling.max_tokens - len(emitted), len(leg.choices)),
            self._workers.candidates("combined", most, but=leg.lost_by | leg.refused_by)
            or self._workers.candidates("combined", most, but=leg.refused_by),
            self._workers.candidates("prefill", total + 1, but=leg.failed_prefill),
            cached,
            self._policy,
            now=now,
            rng=self._rng,
        )
        if placement is None:
            return False
        session = self._workers.get(placement.decode.worker_id)
        computes = self._workers.get(placement.computes.worker_id)
        submit = pb.Submit(
            request=leg.id,
            attempt=leg.attempt + 1,
            tokens=tokens,
            prompt_len=request.prompt_len,
            hash_root=request.hash_root,
            block_hashes=b"".join(hashes),
            sampling=request.sampling,
            n=len(leg.choices),
            choice=min(leg.choices),
            tenant=request.tenant,
            prefill_candidates=[
                pb.PrefillCandidate(worker_id=one.worker_id, address=one.address) for one in placement.prefill
            ],
            long_prefill_tokens=placement.long_prefill_tokens,
            cached_at=_cached_at(placement, cached),
            trace_id=request.trace_id,
            priority=request.priority,
            deadline_ms=self._deadline_ms(request, now),
        )
        session.submit(submit)  # first: the worker begins while the rest is done
        self.history.add(leg.attach(placement, session, computes, now))
        self._metrics.placements(placement.route, "yes" if placement.replicated else "no").inc()
        return True

    def _deadline_ms(self, request: Request, now: float) -> int:
        """What is left of the time to the first token; all of it after a replay, whose next token is as urgent."""
        waited_ms = 0.0 if request.started else (now - request.received) * 1e3
        return max(1, round(self._policy.slo_ttft_ms - waited_ms))

    def _place_again(self, leg: Leg, retry_after_s: float) -> None:
        """Places a leg that came back; where no worker takes it, refuses it or parks it."""
        for part in self._split(leg):
            self._place_part_again(part, retry_after_s)

    def _place_part_again(self, leg: Leg, retry_after_s: float) -> None:
        if leg.id not in self._legs:
            return  # its request failed with another leg
        self._unpark(leg)
        if self._place(leg):
            return
        now = asyncio.get_running_loop().time()
        if not (leg.losses or leg.request.started) and (leg.full or not leg.reroutes):
            self._fail(leg.request, _queues_full(leg.full, retry_after_s))
            return
        if leg.deadline is None:
            leg.deadline = now + PARK_S
        if now >= leg.deadline:
            message = f"No worker could go on with the request within {PARK_S:g} s."
            self._fail(leg.request, unavailable(message, retry_after_s))
            return
        leg.refused_by.clear()
        leg.full.clear()
        self._parked.add(leg)
        wait_s = min(retry_after_s, leg.deadline - now)
        leg.timer = asyncio.get_running_loop().call_later(wait_s, self._place_part_again, leg, RETRY_S)

    def _split(self, leg: Leg) -> list[Leg]:
        """A leg for every choice, where some choice has an output by now; else the leg as it is."""
        if len(leg.choices) == 1 or not leg.request.started:
            return [leg]
        self._remove(leg, "split")
        return [self._add_leg(leg.request, {choice}, leg) for choice in sorted(leg.choices)]

    def _add_leg(self, request: Request, choices: set[int], origin: Leg | None = None) -> Leg:
        leg = Leg(next(self._ids), request, choices)
        if origin is not None:
            leg.attempt, leg.deadline = origin.attempt, origin.deadline
            leg.losses, leg.lost_by = origin.losses, set(origin.lost_by)
            leg.reroutes = origin.reroutes
            leg.failed_prefill = set(origin.failed_prefill)
        self._legs[leg.id] = leg
        request.legs.add(leg)
        return leg

    def _choice_done(self, leg: Leg, choice: int) -> None:
        leg.choice_done(choice)
        if not leg.choices:
            self._remove(leg, "finished")

    def _fail(self, request: Request, error: ApiError) -> None:
        self.cancel(request)
        request.consumer.failed(error)

    def _unpark(self, leg: Leg) -> None:
        self._parked.discard(leg)
        if leg.timer is not None:
            leg.timer.cancel()
            leg.timer = None

    def _remove(self, leg: Leg, outcome: str) -> None:
        self._unpark(leg)
        leg.detach(outcome)
        self._legs.pop(leg.id, None)
        leg.request.legs.discard(leg)


def _cached_at(placement: Placement, cached: Prefixes) -> pb.CachedPrefix | None:
    source = placement.cached_at
    if source is None:
        return None
    return pb.CachedPrefix(worker_id=source.worker_id, address=source.address, blocks=cached.cached[source.worker_id])


def _reason(refusal: pb.Refusal) -> str:
    match refusal.kind:
        case pb.Refusal.KIND_QUEUE_FULL:
            return "over_share" if refusal.over_share else "queue_full"
        case pb.Refusal.KIND_REROUTE:
            return "reroute"
    return "failed"


def _retry_after_s(refusal: pb.Refusal) -> float:
    return min(refusal.retry_after_ms / 1e3, MOST_RETRY_S) or RETRY_S


def _queues_full(refusals: Sequence[pb.Refusal], retry_after_s: float) -> ApiError:
    """No worker's queue has room for a request: for this tenant's, or for anybody's."""
    soonest_s = min(map(_retry_after_s, refusals), default=retry_after_s)
    if refusals and all(refusal.over_share for refusal in refusals):
        return too_many("Too many of your requests wait already; try again later.", soonest_s)
    return unavailable("All workers' queues are full; try again later.", soonest_s, code="queue_full")

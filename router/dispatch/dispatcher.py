"""The life of a request between router and workers.

A request is one prompt with `n` choices. Its attempts (attempts.py) go through these states:

    placed -> running -> done                 each choice ends with its finish reason, or when its client stops it
       ^         |
       |         +--- queue full              -> another worker; if none is left: 429 or 503, or after a replay waiting
       +---------+--- rerouted                -> another worker or the same, without the prefill workers that failed
       |         +--- worker lost             -> replayed: prompt and output so far, one attempt per choice
       |         +--- worker crashed          -> the same, as a suspect; if it crashes the next one, too: 500
       +---------+--- parked (worker drains,  -> moved: as replayed, with the pages of the old worker, which keeps
       |              prefers prefills, is       them until the first token from elsewhere; without another worker it
       |              slow or full)              goes on where it is parked
       +---------+--- failed                  -> another worker, once and before the first token; else the request fails

A new request is refused before it is placed if its prompt would wait longer than it may, as predicted. It is given up
once it has waited longer without a first token; waits for a model to wake count apart (wake_waits.py). An attempt that
has run before and finds no worker waits up to MAX_WAIT_S for one. Nothing else waits here. An emitted token is never
sampled again; a replay continues after it.

Any request on a worker that crashed may be the cause. Each is a suspect until its replay has PROBATION_TOKENS more
tokens. A worker runs only one suspect at a time, beside requests that are none, so the next crash says which one it is.
"""

import asyncio
import itertools
import logging
from collections.abc import Container, Sequence
from random import Random

from cpd.common.blocks import BLOCK_SIZE
from cpd.planner.arrivals import Arrivals
from cpd.planner.load import RequestClass
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError
from router.dispatch.attempts import Attempt, FullQueue, Parked, RequestRoute, RoutedRequest
from router.dispatch.convictions import REMEMBERED_S, Convictions
from router.dispatch.loop_slices import LoopSlices
from router.dispatch.wake_waits import WakeWaits
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import Workers
from router.errors import (
    ApiError,
    crashes_workers,
    failed,
    one_line,
    too_many,
    unavailable,
    waits_too_long,
    wake_failed,
)
from router.events import EventKind
from router.placement.candidate import Candidate
from router.placement.decisions import Decisions
from router.placement.moves import Move, Moves, Stream
from router.placement.policy import Placement, PlacementPolicy, Prompt, Situation, Targets
from router.request_metrics import RequestMetrics

log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
"""Time for which a request that lost its worker waits for another one, in seconds."""

MAX_FAILURES = 1
"""A request that fails on more workers than this is given up: it would fail on all of them."""

MAX_LOSSES = 4
"""A request that loses more workers than this, for whatever reasons, is given up."""

TOGETHER_S = 0.05
"""A worker that sent something this long after a crash, in seconds, did not die together with the crashed one, as the
workers of a machine do. Only such a worker gets a suspect, and only its crash tells against one."""

TURN_S = 0.1
"""Pause after which a suspect looks again for a worker without other suspects, in seconds."""

MAX_QUEUE_FULL = 3
"""A new request is refused once this many workers, the most promising ones, had full queues."""

IMMEDIATE_REROUTES = 3
"""A request that was rerouted more often than this is placed again only after a pause."""

RETRY_S = 1.0
"""Retry time if a worker suggests none, in seconds."""

MAX_MOVES = 4
"""Number of attempts that move away from a worker at a time, so that each stands still only briefly."""

REST_S = 10.0
"""An attempt that has moved does not move for this long because its worker is slow or full, in seconds."""

MOVE_S = 5.0
"""Time for an attempt that moves to get a token from its new worker, in seconds. Then it goes on elsewhere, or back."""

STAY_S = 10.0
"""An attempt that no other worker took is not moved again for this long, in seconds: each try makes it stand still."""

MAX_RETRY_S = 600.0
"""Upper bound on the retry time that a worker suggests, in seconds."""


class Dispatcher:
    """Sends requests to workers and their tokens to the requests' choices. It is the listener of every worker session.

    Args:
        policy: Chooses the workers.
        targets: What the operator asks of it.
        max_wait_s: Longest wait of a prompt before it is computed, in seconds.
        rng: Decides between equally good workers.

    Attributes:
        decisions: Recent placements.
        arrivals: Counts the requests, for the planner.
    """

    def __init__(
        self,
        workers: Workers,
        metrics: RequestMetrics,
        policy: PlacementPolicy,
        targets: Targets,
        *,
        max_wait_s: float,
        rng: Random,
    ) -> None:
        self._loop = asyncio.get_running_loop()  # asking for it each time takes a system call
        self._max_wait_s = max_wait_s
        self.decisions = Decisions()
        self.arrivals = Arrivals()
        self._learning = workers.learning
        metrics.fallback.set_function(lambda: float(not workers.learning.trusted))
        self._workers = workers
        self._metrics = metrics
        self._policy = policy
        self._targets = targets
        self._rng = rng
        # unique over all routers, since `Load.awaiting_first_token` carries them
        self._ids = itertools.count(rng.randrange(1, 1 << 60))
        self._attempts: dict[int, Attempt] = {}
        self._suspects: set[Attempt] = set()
        self._convictions = Convictions()
        self._slices = LoopSlices(self._on_output)
        self._moves = Moves(targets, workers.learning.settings)
        self._wakes = WakeWaits(self._expired)

    # ---- called by the API ----

    def start(self, request: RoutedRequest) -> None:
        """Places a new request.

        Raises:
            ApiError: No worker is live, the policy failed, the same request has crashed workers, or it would wait too
                long.
        """
        self._check(request)
        attempt = self._add_attempt(request, set(range(len(request.choices))))
        if not self._place(attempt):
            self._remove(attempt, "not placed")
            raise unavailable("No worker is ready to serve the model.", RETRY_S)
        assert attempt.decision is not None
        # a prompt may be under way when it has waited as long as it may: it gets twice the time that it should take
        cost = attempt.decision.placement.chosen.cost
        may_take_s = self._max_wait_s + 2 * (cost.prefill_ms + cost.handoff_ms) / 1e3
        self._wakes.limit(attempt, request.received + may_take_s)

    def cancel(self, request: RoutedRequest, *, given_up: bool = False) -> None:
        """Ends a request on all its workers.

        Args:
            given_up: It has waited too long. If its model is about to wake for it, the model still does.
        """
        for attempt in list(request.attempts):
            if attempt.session is not None:
                attempt.session.abort(pb.Abort(request=attempt.id, attempt=attempt.number, given_up=given_up))
            self._remove(attempt, "cancelled")
        request.end_expiry()

    def close(self) -> None:
        """Fails all running requests, because the router stops."""
        for request in {attempt.request for attempt in self._attempts.values()}:
            self._fail(request, unavailable("The server is shutting down; try again.", RETRY_S))

    # ---- called by sessions ----

    def ready(self, session: WorkerSession) -> None:
        """Places waiting attempts again, because a worker is live."""
        for attempt in [attempt for attempt in self._attempts.values() if attempt.timer is not None]:
            self._place_or_wait(attempt, RETRY_S)

    def step(self, session: WorkerSession, step: pb.StepOutput) -> None:
        """Handles the tokens of one engine step: first tokens now, others after yielding to the event loop."""
        for output in step.outputs:
            attempt = self._attempts.get(output.request)
            if attempt is not None and attempt.request.started:
                self._slices.add((session, output), len(output.token_ids))
            else:
                self._on_output((session, output))

    def refusal(self, session: WorkerSession, refusal: pb.Refusal) -> None:
        """Retries or fails an attempt that a worker gave back."""
        self._slices.flush()
        attempt = self._attempts.get(refusal.request)
        if attempt is None or attempt.session is not session or attempt.number != refusal.attempt:
            return
        if refusal.kind == pb.Refusal.KIND_PARKED:
            self._on_parked(attempt, session)
            return
        retry_after_s, message, reason = _retry_after_s(refusal), one_line(refusal.message), _reason(refusal)
        self._detach(attempt, f"{reason}: {message}")
        self._metrics.refusals(reason).inc()
        attempt.refused_by.add(session.id)
        if refusal.kind == pb.Refusal.KIND_QUEUE_FULL:
            attempt.queue_full.append(FullQueue(retry_after_s + _wake_s(session), refusal.over_share))
            if len(attempt.queue_full) < MAX_QUEUE_FULL or attempt.losses or attempt.request.started:
                self._retry(attempt, retry_after_s)
            else:
                self._fail(attempt.request, _queues_full(attempt.queue_full, retry_after_s))
        elif refusal.kind == pb.Refusal.KIND_REROUTE:
            log.info("the request is rerouted: %s", message, extra=attempt.request.log_fields)
            attempt.reroutes += 1
            attempt.failed_prefill.update(refusal.failed_prefill_workers)
            # the same worker may take it at once, unless it keeps rerouting: such a worker is probably draining
            self._retry(attempt, 0 if attempt.reroutes <= IMMEDIATE_REROUTES else retry_after_s)
        else:
            log.error("worker %s failed the request: %s", session.id, message, extra=attempt.request.log_fields)
            attempt.failures += 1
            if attempt.parked is not None:  # its last worker still has it
                self._retry(attempt, RETRY_S)
            elif session.residency in ("asleep", "waking"):  # its model can't wake
                if not all(self._place(part) for part in self._split(attempt)):
                    self._fail(attempt.request, wake_failed(message, retry_after_s))
            elif attempt.request.started or attempt.failures > MAX_FAILURES or not self._place(attempt):
                self._fail(attempt.request, failed(f"The worker could not finish the request: {message}"))

    def reported(self, session: WorkerSession) -> None:
        """Handles a load report: the worker sleeps or wakes; or it gives its attempts away, or is slow or full, so that
        they move."""
        if session.shared:
            self._wakes.reported(session, self._attempts.values())
        if not (session.gives_away or self._suspicious(session)):
            return
        for attempt in self._attempts.values():
            if attempt.session is session:
                attempt.park_asked = False  # the worker may have had to ignore it
        if session.gives_away:
            self._move(session)
        else:
            self._relieve(session)

    def lost(self, session: WorkerSession, *, crashed: bool) -> None:
        """Replays, on other workers, the attempts of a session that has ended.

        Args:
            crashed: The worker crashed, perhaps because of one of them.
        """
        self._slices.flush()
        self._moves.forget(session.id)
        for attempt in self._attempts.values():
            if attempt.parked is not None and attempt.parked.session is session:
                attempt.parked = None  # its pages are gone
        if crashed:
            self._crashed(session)
        affected = [attempt for attempt in self._attempts.values() if attempt.session is session]
        kind: EventKind = "crashed" if crashed else "left" if session.drained else "lost"
        self._workers.events.add(kind, session.id, session.reason, len(affected))
        for attempt in affected:
            if attempt.id not in self._attempts:
                continue  # another attempt of its request has failed
            self._detach(attempt, "worker lost")
            self._metrics.replays.inc()
            attempt.losses += 1
            attempt.lost_by.add(session.id)
            if attempt.losses > MAX_LOSSES:
                self._fail(attempt.request, failed(f"{attempt.losses} workers were lost while running this request."))
                continue
            log.info("the request is replayed: worker %s is lost", session.id, extra=attempt.request.log_fields)
            attempt.refused_by.clear()
            self._retry(attempt, RETRY_S)

    def _crashed(self, session: WorkerSession) -> None:
        """Makes suspects of a crashed worker's attempts, and convicts the one that was a suspect before if it is the
        only one. A request whose two workers, for prefill and for decode, died together has seen one crash."""
        now = self._loop.time()
        present = [one for one in self._attempts.values() if session in (one.session, one.prefill_session)]
        suspected = {one.request for one in present if one.crashes and _outlived(session, one)}
        for attempt in present:
            attempt.crashed(session.id, now)
        self._suspects.update(present)
        if len(suspected) == 1:
            (request,) = suspected
            crashes = max((attempt.crashes for attempt in present if attempt.request is request), key=len)
            log.warning("the request is given up: it crashed workers %s", ", ".join(crashes), extra=request.log_fields)
            self._metrics.convictions.inc()
            given_up = f"a request is given up: it crashed workers {', '.join(crashes)}"
            self._workers.events.add("request_crashes_workers", session.id, given_up, 1)
            self._convictions.add(request.digest, now)
            message = f"{len(crashes)} workers crashed while running this request, so it is not tried again."
            self._fail(request, crashes_workers(f"{message} Tell the operator of this server its request id."))

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
                self._accept(attempt, session, output)
            elif output.choice >= len(attempt.request.choices):
                raise ProtocolError(f"choice {output.choice} of a request that has {len(attempt.request.choices)}")
        except ProtocolError as error:
            session.fail(error)
        except Exception:
            log.exception("the output of the request could not be processed", extra=attempt.request.log_fields)
            self._fail(attempt.request, failed("The output could not be processed."))

    def _accept(self, attempt: Attempt, session: WorkerSession, output: pb.Output) -> None:
        request, index, token_ids = attempt.request, output.choice, list(output.token_ids)
        attempt.check(output, token_ids)
        choice, now = request.choices[index], self._loop.time()
        if attempt.waits_since is not None:
            self._wakes.end(attempt)
        first = attempt.on_output(output, now)
        if output.HasField("landed"):
            self._metrics.transfer_wait.observe(output.landed.waited_ms / 1e3)
        if attempt.parked is not None:
            self._moved(attempt)
        if attempt.crashes:
            self._end_probation(attempt, len(token_ids))
        request.outputs[index].extend(token_ids)
        self._metrics.activity.tokens += len(token_ids)
        if known := choice.num_tokens:
            self._metrics.itl.observe(now - choice.last_at)
        choice.last_at = now
        choice.push(token_ids, output.logprobs, output.finish)
        self._metrics.output_tokens.count += choice.num_tokens - known
        if choice.has_delta:
            request.consumer.updated(choice)
        if not request.started:
            request.started = True
            request.end_expiry()
            wake_s = request.wake_s + (attempt.decision.wake_s if attempt.decision is not None else 0.0)
            worker, cached_tokens = output.prefilled.prefill_worker, output.prefilled.cached_tokens
            route = RequestRoute(session.id, worker, cached_tokens, output.prefilled.queue_ms, wake_s * 1e3)
            request.consumer.started(route)
            self._loop.call_soon(self._count_first, request, route)  # after the tokens are on their way
        if output.finish != pb.FINISH_NONE:
            self._choice_done(attempt, index)
        elif choice.finish is not None:  # by a stop string, which the worker does not know
            session.abort(pb.Abort(request=attempt.id, attempt=attempt.number, choices=[index]))
            self._choice_done(attempt, index)
        if first is not None:
            self._loop.call_soon(self._learning.first_token, *first)

    def _end_probation(self, attempt: Attempt, num_tokens: int) -> None:
        """Counts a suspect's new tokens; with enough of them it is none any more."""
        attempt.probation -= num_tokens
        if attempt.probation <= 0:
            attempt.crashes.clear()
            self._suspects.discard(attempt)

    def _count_first(self, request: RoutedRequest, route: RequestRoute) -> None:
        if route.wake_ms:
            self._metrics.wake_waits(request.tenant).observe(route.wake_ms / 1e3)
        self._metrics.queue(request.tenant).observe(route.queue_ms / 1e3)
        self._metrics.usage.prompt(request.tenant, request.prompt_len, route.cached_tokens)

    def _choice_done(self, attempt: Attempt, choice: int) -> None:
        self._learning.answer(attempt.request.tenant, len(attempt.request.outputs[choice]))
        attempt.choice_done(choice)
        if not attempt.choices:
            self._remove(attempt, "finished")
            request = attempt.request
            if not request.attempts and request.load_class is not None:
                self.arrivals.answered(request.load_class, sum(map(len, request.outputs)))

    # ---- moving ----

    def _move(self, session: WorkerSession) -> None:
        """Asks a worker that gives its attempts away to park the next ones for which there is another worker."""
        free = self._free_moves(session)
        only_streams = not (session.load.moving or session.role == "prefill")  # the worker goes on after its next wake
        for attempt in self._movable(session):
            if free <= 0:
                break
            if only_streams and not attempt.request.started:
                continue  # it keeps its place in the queue: elsewhere it could be refused
            exclude = self._unable(attempt.request) | {session.id}
            if not attempt.park_asked and self._move_targets(attempt.longest, exclude):
                self._ask_to_park(attempt, None)
                free -= 1

    def _move_targets(self, tokens: int, exclude: Container[str]) -> list[Candidate]:
        """The combined workers that streams may move to: those that serve."""
        return [one for one in self._workers.candidates("combined", tokens, exclude) if one.serving]

    def _suspicious(self, session: WorkerSession) -> bool:
        """True if streams may have to move because the worker is slow or full."""
        load = session.worker_load
        if not (self._learning.settings.moves and self._learning.trusted and session.live and load is not None):
            return False
        if session.residency != "serving":  # its streams go on after the next wake
            return False
        now = self._loop.time()
        return self._moves.suspicious(load.candidate, lambda: self._move_targets(1, ()), now)

    def _relieve(self, session: WorkerSession) -> None:
        """Asks a worker that is slow or full to park the attempt that gains most by moving, if one does."""
        now = self._loop.time()
        if session.worker_load is None or self._free_moves(session) <= 0:
            return
        streams = {
            attempt.id: Stream(
                attempt.id,
                attempt.request.prompt_len + len(attempt.emitted),
                len(attempt.emitted),
                attempt.request.sampling.max_tokens,
                self._learning.expected_output(attempt.request.tenant),
            )
            for attempt in self._movable(session)
            if attempt.request.started and not attempt.crashes
            if len(attempt.choices) == 1 and now >= attempt.moved_at + REST_S
        }
        longest = max((self._attempts[key].longest for key in streams), default=0)
        others = self._move_targets(longest, {session.id})
        move = self._moves.find(session.worker_load.candidate, list(streams.values()), others, now)
        if move is not None:
            self._ask_to_park(self._attempts[move.key], move)

    def _movable(self, session: WorkerSession) -> list[Attempt]:
        now = self._loop.time()
        return [one for one in self._attempts.values() if one.session is session and now >= one.stays_until]

    def _free_moves(self, session: WorkerSession) -> int:
        """The number of attempts that may begin to move away from a worker."""
        attempts = self._attempts.values()
        away = sum(one.parked is not None and one.parked.session is session for one in attempts)
        return MAX_MOVES - away - sum(one.park_asked for one in attempts if one.session is session)

    def _ask_to_park(self, attempt: Attempt, move: Move | None) -> None:
        assert attempt.session is not None
        attempt.session.park(pb.Park(request=attempt.id, attempt=attempt.number))
        attempt.park_asked, attempt.move = True, move

    def _on_parked(self, attempt: Attempt, session: WorkerSession) -> None:
        """Places an attempt elsewhere, which its worker has parked."""
        move = attempt.move
        target, why = (move.target, f" to {move.target}: {move.describe()}") if move is not None else ("", "")
        parked = Parked(session, pb.Park(request=attempt.id, attempt=attempt.number), target)
        self._detach(attempt, f"parked, to move{why}")
        attempt.refused_by.clear()
        attempt.queue_full.clear()
        parts = self._split(attempt)
        for part in parts:  # before any is placed: if that fails the request, the worker must let go of all of them
            part.parked = parked
        for part in parts:
            self._place_or_wait(part, RETRY_S)

    def _end_slow_move(self, attempt: Attempt, number: int) -> None:
        """Takes an attempt from a worker that was given it MOVE_S ago, if it still has no token from there."""
        session = attempt.session
        if attempt.id not in self._attempts or attempt.number != number or attempt.parked is None or session is None:
            return
        log.info(
            "the request leaves worker %s, which is slow to start it", session.id, extra=attempt.request.log_fields
        )
        session.abort(pb.Abort(request=attempt.id, attempt=attempt.number))
        self._detach(attempt, "slow to start")
        attempt.refused_by.add(session.id)
        self._place_or_wait(attempt, RETRY_S)

    def _moved(self, attempt: Attempt) -> None:
        """Frees the pages that a worker keeps for an attempt, which goes on elsewhere, and moves the next one."""
        parked = attempt.parked
        assert parked is not None
        attempt.moved_at = self._loop.time()
        self._metrics.moves("moved").inc()
        self._unpark(attempt)
        if parked.session.gives_away:
            self._move(parked.session)

    def _unpark(self, attempt: Attempt) -> None:
        if attempt.parked is not None:
            name = attempt.parked.name
            choices = sorted(attempt.choices)
            attempt.parked.session.abort(pb.Abort(request=name.request, attempt=name.attempt, choices=choices))
            attempt.parked = None

    # ---- placing and retrying ----

    def _place(self, attempt: Attempt) -> bool:
        """Sends the attempt to the best worker. Returns False if there is none.

        Raises:
            ApiError: The policy failed.
        """
        request, workers, now = attempt.request, self._workers, self._loop.time()
        if workers.model.fingerprint != request.fingerprint:
            return False
        longest, barred, parked = attempt.longest, self._barred(attempt, now), attempt.parked
        unable = self._unable(request)
        refused_by = attempt.refused_by | barred | unable
        # workers lost while running it get it again only if there are no others
        combined = workers.takers(longest, exclude=attempt.lost_by | refused_by)
        combined = combined or workers.takers(longest, exclude=refused_by)
        if parked is not None:  # the worker that it leaves may take requests, if only another model needs its memory
            combined = [one for one in combined if one.serving and one.worker_id != parked.session.id]
        if parked is not None and parked.target:
            combined = [one for one in combined if one.worker_id == parked.target]
        # no other worker takes it: it goes on where it is parked, unless it is a suspect and others are there
        returns = not combined and parked is not None and parked.session.id not in refused_by
        if parked is not None and returns and parked.session.worker_load is not None:
            combined = [parked.session.worker_load.candidate]
        if not combined:
            return False
        takers = {one.worker_id for one in combined}  # a prefill worker, if no combined one is live
        emitted = attempt.emitted
        tokens, hashes = request.with_output(emitted)
        total = request.prompt_len + len(emitted)
        situation = Situation(
            Prompt(
                total,
                request.sampling.max_tokens - len(emitted),
                len(attempt.choices),
                self._learning.expected_output(request.tenant),
            ),
            combined,
            workers.candidates("prefill", total + 1, exclude=attempt.failed_prefill | barred | unable | takers),
            workers.index.cached_prefixes(hashes),
            self._targets,
            now,
            self._rng,
            self._learning.trusted,
            self._learning.evicted_reuse,
            self._learning.behind_combined(now),
            self._learning.behind_prefill(now),
        )
        self._loop.call_soon(self._learn_prompt, request, situation, takers)  # once a worker has it
        try:
            placement = self._policy.place(situation)
        except Exception:
            log.exception("the placement policy failed", extra=request.log_fields)
            raise failed("The placement policy failed.") from None
        if attempt.number < 0:
            self._check_wait(request, placement, situation)
            self._loop.call_soon(self._learning.placed, situation, placement)
        if parked is not None:
            placement = parked.placement(placement, len(hashes))
        decode, prefill = workers.get(placement.decode.worker_id), workers.get(placement.prompt_worker.worker_id)
        returns = parked is not None and decode is parked.session
        # the next token after a replay is as urgent as a first one, and gets the whole target
        waited_ms = 0.0 if request.started else (now - request.received) * 1e3
        target_ms = min(self._targets.slo_ttft_ms, (request.needed_at - request.received) * 1e3)
        deadline_ms = max(1, round(target_ms - waited_ms))
        # sent first, so that the worker begins while the router keeps its books
        submit = attempt.submit(placement, tokens, hashes, deadline_ms)
        if parked is not None and returns:
            submit.resumes.CopyFrom(parked.name)
            attempt.parked, attempt.stays_until = None, now + STAY_S
            self._metrics.moves("returned").inc()
            self._moves.forget(parked.session.id)
        decode.submit(submit)
        self.decisions.add(attempt.attach(placement, decode, prefill, now))
        self._wakes.placed(attempt)
        self._metrics.placements(placement.route, "yes" if placement.replicates_prefix else "no").inc()
        if attempt.parked is not None:
            self._loop.call_later(MOVE_S, self._end_slow_move, attempt, attempt.number)
        return True

    def _learn_prompt(self, request: RoutedRequest, seen: Situation, takers: Container[str]) -> None:
        self._learning.prompt(seen.prompt.tokens, seen.most_cached_tokens)
        if request.load_class is None:
            request.load_class = self._arrived(seen, takers)

    def _arrived(self, seen: Situation, takers: Container[str]) -> RequestClass:
        """Counts a new request: what the best worker that takes it, and the average worker, has not cached."""
        tokens, cached = seen.prompt.tokens, seen.cached.cached
        best = max((blocks for worker, blocks in cached.items() if worker in takers), default=0)
        mean = sum(cached.values()) / (len(seen.combined) + len(seen.prefill))
        return self.arrivals.arrived(tokens, tokens - BLOCK_SIZE * best, round(tokens - BLOCK_SIZE * mean))

    def _check(self, request: RoutedRequest) -> None:
        """Raises ApiError if the same request has crashed workers."""
        if self._convictions and self._convictions.includes(request.digest, self._loop.time()):
            message = f"This request crashed workers in the last {REMEMBERED_S / 60:g} minutes and is refused for now."
            raise crashes_workers(f"{message} Tell the operator of this server its request id.")

    def _check_wait(self, request: RoutedRequest, placement: Placement, situation: Situation) -> None:
        """Raises ApiError if the request would wait longer than it may before its prompt is computed.

        How long the model takes to wake does not count: what is promised is an upper bound, and a request that was
        refused would not have woken it.
        """
        if not situation.trusted:
            return
        chosen = placement.chosen
        wait_s, wake_s = chosen.cost.wait_ms / 1e3, chosen.cost.wake_ms / 1e3
        if wait_s > self._max_wait_s:
            message = f"The request would wait {wait_s:.0f} s, longer than the {self._max_wait_s:g} s that it may."
            raise waits_too_long(f"{message} Try again later.", wake_s + wait_s)
        ttft_s, left_s = chosen.ttft_ms / 1e3 - wake_s, request.needed_at - situation.now
        if ttft_s > left_s:
            message = f"The first token would come in {ttft_s:.1f} s, and the request allows {max(0.0, left_s):.1f} s."
            raise waits_too_long(f"{message} Try again later.", wake_s + wait_s)

    def _expired(self, request: RoutedRequest) -> None:
        """Gives up a request that has waited too long."""
        now = self._loop.time()
        waits_ms = [one.wake_ms(now) + one.queue_ms(now) + one.overdue_ms for one in self._workers.takers(1)]
        message = f"There was no first token after {now - request.received:.1f} s, so the request is given up."
        if request.waits_for_wake:
            message = f"The model was not awake after {now - request.received:.1f} s, so the request is given up."
        error = waits_too_long(f"{message} Try again later.", min(waits_ms, default=0.0) / 1e3)
        self._fail(request, error, given_up=True)

    def _unable(self, request: RoutedRequest) -> set[str]:
        """The workers that can't serve a request: those that would not follow its grammar or its thinking budget."""
        asked = request.sampling.HasField("grammar") or request.sampling.HasField("thinking_budget")
        return self._workers.without_grammars if asked else set()

    def _barred(self, attempt: Attempt, now: float) -> set[str]:
        """The workers that a suspect does not go to: those with other suspects, and those that may have died together
        with its last one; none while another choice of its request is on probation. A suspect that has waited for
        MAX_WAIT_S goes to any."""
        if not attempt.crashes or (attempt.deadline is not None and now >= attempt.deadline):
            return set()
        running = [one for one in self._suspects if one.session is not None]
        if any(one.request is attempt.request for one in running):
            return {session.id for session in self._workers.sessions}
        occupied = {session.id for one in running for session in (one.session, one.prefill_session) if session}
        return occupied | {session.id for session in self._workers.sessions if not _outlived(session, attempt)}

    def _retry(self, attempt: Attempt, retry_after_s: float) -> None:
        """Places an attempt again, split by choice if it has output."""
        for part in self._split(attempt):
            self._place_or_wait(part, retry_after_s)

    def _place_or_wait(self, attempt: Attempt, retry_after_s: float) -> None:
        """Places an attempt. If no worker takes it, it waits or fails."""
        if attempt.id not in self._attempts:
            return  # another attempt of its request has failed
        self._end_wait(attempt)
        try:
            self._check(attempt.request)  # another one like it may have crashed workers meanwhile
            if self._place(attempt):
                return
        except ApiError as error:
            self._fail(attempt.request, error)
            return
        now = self._loop.time()
        if not attempt.may_wait:
            self._fail(attempt.request, _queues_full(attempt.queue_full, retry_after_s))
            return
        if attempt.deadline is None:
            attempt.deadline = now + MAX_WAIT_S
        if now >= attempt.deadline:
            message = f"No worker could continue the request within {MAX_WAIT_S:g} s."
            self._fail(attempt.request, unavailable(message, retry_after_s))
            return
        attempt.refused_by.clear()
        attempt.queue_full.clear()
        wait_s = min(TURN_S if attempt.crashes else retry_after_s, attempt.deadline - now)
        attempt.timer = self._loop.call_later(wait_s, self._place_or_wait, attempt, RETRY_S)

    def _split(self, attempt: Attempt) -> list[Attempt]:
        """Replaces the attempt by one per choice if the request has output."""
        if len(attempt.choices) == 1 or not attempt.request.started:
            return [attempt]
        self._remove(attempt, "split")
        return [self._add_attempt(attempt.request, {choice}, attempt) for choice in sorted(attempt.choices)]

    def _add_attempt(self, request: RoutedRequest, choices: set[int], origin: Attempt | None = None) -> Attempt:
        attempt = Attempt(next(self._ids), request, choices)
        if origin is not None:  # it has output: refusals for full queues and failures no longer count
            attempt.number, attempt.deadline = origin.number, origin.deadline
            attempt.losses, attempt.lost_by = origin.losses, set(origin.lost_by)
            attempt.crashes, attempt.crashed_at = list(origin.crashes), origin.crashed_at
            attempt.probation = origin.probation
            if attempt.crashes:
                self._suspects.add(attempt)
            attempt.reroutes = origin.reroutes
            attempt.failed_prefill = set(origin.failed_prefill)
        self._attempts[attempt.id] = attempt
        request.attempts.add(attempt)
        return attempt

    def _fail(self, request: RoutedRequest, error: ApiError, *, given_up: bool = False) -> None:
        self.cancel(request, given_up=given_up)
        request.consumer.failed(error)

    def _end_wait(self, attempt: Attempt) -> None:
        if attempt.timer is not None:
            attempt.timer.cancel()
            attempt.timer = None

    def _detach(self, attempt: Attempt, outcome: str) -> None:
        self._wakes.end(attempt)
        attempt.detach(outcome, self._loop.time())

    def _remove(self, attempt: Attempt, outcome: str) -> None:
        self._end_wait(attempt)
        self._unpark(attempt)
        self._detach(attempt, outcome)
        self._attempts.pop(attempt.id, None)
        self._suspects.discard(attempt)
        attempt.request.attempts.discard(attempt)


def _outlived(session: WorkerSession, suspect: Attempt) -> bool:
    """True if the worker did not die together with the last one that crashed under the suspect."""
    return session.heard_at >= suspect.crashed_at + TOGETHER_S


def _reason(refusal: pb.Refusal) -> str:
    match refusal.kind:
        case pb.Refusal.KIND_QUEUE_FULL:
            return "over_share" if refusal.over_share else "queue_full"
        case pb.Refusal.KIND_REROUTE:
            return "reroute"
    return "failed"


def _retry_after_s(refusal: pb.Refusal) -> float:
    return min(refusal.retry_after_ms / 1e3, MAX_RETRY_S) or RETRY_S


def _wake_s(session: WorkerSession) -> float:
    """Time until the worker serves, in seconds; 0 if it does."""
    now = asyncio.get_running_loop().time()
    return session.worker_load.candidate.wake_ms(now) / 1e3 if session.worker_load is not None else 0.0


def _queues_full(refusals: Sequence[FullQueue], retry_after_s: float) -> ApiError:
    """The error for full queues: 429 if only this tenant's share of them is used up, else 503."""
    soonest_s = min((one.retry_after_s for one in refusals), default=retry_after_s)
    if refusals and all(one.over_share for one in refusals):
        return too_many("Too many of your requests are waiting already; try again later.", soonest_s)
    return unavailable("All workers' queues are full; try again later.", soonest_s, code="queue_full")

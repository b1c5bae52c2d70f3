"""The simulated router: follows the workers' loads and caches, and places requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from cpd.common.blocks import BLOCK_SIZE, short_hashes
from cpd.common.policy_settings import PolicySettings
from cpd.planner.capacity import Fleet
from cpd.planner.load import LoadMeter, RequestClass
from cpd.rpc import cpd_pb2 as pb
from engine.types import CacheEvent, Finish, Output, Request
from router.dispatch.dispatcher import MAX_QUEUE_FULL
from router.placement.candidate import Candidate
from router.placement.learning import Learning
from router.placement.policy import Placement, PlacementPolicy, Prompt, Situation, Targets
from router.placement.worker_load import WorkerLoad
from router.prefix_index.index import PrefixIndex
from sim.cluster.disaggregation import DecodeSide, PlacedRequest
from sim.cluster.worker import SimWorker
from sim.events import Events

PROFILES = 8
"""Number of workers whose profiles stand for all when a planner predicts."""


@dataclass(eq=False, slots=True)
class RequestState:
    """A request in flight.

    Attributes:
        number: Number of its conversation.
        on_end: Called when the last token is sampled.
        on_refused: Called when no worker takes the request.
        token_ids: The answer so far.
        times_s: When the router receives each of them.
        cached_tokens: Prompt tokens that came from a cache, once known.
        remote: Whether a prefill worker computed the prompt, once known.
        decode, prefill: Workers of the last placement; equal if the prompt is computed locally.
        placement, placed_at: The last placement and its time.
        refused_by: Combined workers that have refused it.
        queues_full: Number of those whose queue was full.
        failed_prefill: Prefill workers that have refused it.
        measured: Its class in the measured load.
    """

    number: int
    request: Request
    on_end: Callable[["RequestState", Finish], None]
    on_refused: Callable[["RequestState"], None]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    remote: bool = False
    decode: str = ""
    prefill: str = ""
    placement: Placement | None = None
    placed_at: float = 0.0
    refused_by: set[str] = field(default_factory=set)
    queues_full: int = 0
    failed_prefill: frozenset[str] = frozenset()
    measured: RequestClass | None = None


class SimRouter:
    """One router with sessions to all workers.

    Args:
        policy: Chooses the workers.
        sides: Counterparts of all workers, by name.
        network_s: Delay of a message between router and worker.
        on_load: Called with each load report when it is sent.
        max_tokens: Output limit that requests have, if their answers are not longer.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        targets: Targets,
        workers: Sequence[SimWorker],
        sides: Mapping[str, DecodeSide],
        events: Events,
        network_s: float,
        seed: int,
        on_load: Callable[[SimWorker, pb.Load], None],
        max_tokens: int,
        settings: PolicySettings,
    ) -> None:
        self._policy = policy
        self._targets = targets
        self._max_tokens = max_tokens
        self.learning = Learning(settings, targets.slo_ttft_ms)
        self._sides = sides
        self._events = events
        self._network_s = network_s
        self._rng = Random(seed)
        self._on_load = on_load
        self._requests: dict[str, RequestState] = {}  # by the request's id
        self._index = PrefixIndex()
        self.meter = LoadMeter(events.now, settings.expected_output)
        self._workers = {worker.id: worker for worker in workers}
        self._loads = {worker.id: self._follow(worker) for worker in workers}

    def submit(self, state: RequestState) -> None:
        """Places a request and sends it to its worker."""
        request, now = state.request, self._events.now
        self._requests[request.id] = state
        combined = self._candidates("combined", state.refused_by)
        if not combined and not state.queues_full:  # only prefill workers were full: all may compute it themselves
            state.refused_by.clear()
            combined = self._candidates("combined", frozenset())
        if not combined or state.queues_full == MAX_QUEUE_FULL:
            del self._requests[request.id]
            state.on_refused(state)
            return
        situation = Situation(
            Prompt(
                len(request.token_ids),
                max(request.params.max_tokens, self._max_tokens),
                expected_output=self.learning.expected_output(""),
            ),
            combined,
            self._candidates("prefill", state.failed_prefill),
            self._index.cached_prefixes(request.block_hashes),
            self._targets,
            now,
            self._rng,
            self.learning.trusted,
            self.learning.evicted_reuse,
            self.learning.behind_combined(now),
            self.learning.behind_prefill(now),
        )
        self.learning.prompt(len(request.token_ids), situation.most_cached_tokens)
        if state.measured is None:
            state.measured = self._measure(situation)
        placement = self._policy.place(situation)
        if state.placement is None:
            self.learning.placed(situation, placement)
        state.decode, state.prefill = placement.decode.worker_id, placement.prompt_worker.worker_id
        state.placement, state.placed_at = placement, now
        self._loads[state.decode].sequences_started(1)
        self._loads[state.prefill].prompt_sent(state.number, placement.chosen.cost.prefill_ms, now)
        placed = PlacedRequest(
            request,
            prefill=tuple(self._workers[one.worker_id] for one in placement.prefill),
            prefix_source=self._workers[placement.prefix_source.worker_id] if placement.prefix_source else None,
            long_prefill_tokens=placement.long_prefill_tokens,
            on_first=lambda output, tokens: self._first_by_other(state, output, tokens),
            on_refused=lambda: self._events.after(self._network_s, self._refused, state),
            on_rerouted=lambda: self._events.after(self._network_s, self._rerouted, state, placement),
        )
        self._events.at(now + self._network_s, self._sides[state.decode].take, placed)

    def requests_on(self, worker: SimWorker) -> int:
        """Number of requests on a worker, as the router knows it."""
        return self._loads[worker.id].candidate.requests

    def role_changed(self, worker: SimWorker) -> None:
        """A worker has another role: its times are learned afresh, from the mean of the workers with this role."""
        self._loads[worker.id].errors = self.learning.worker(prefills_only=worker.role == "prefill")

    def output(self, output: Output) -> None:
        """A combined worker has sampled a request's next token."""
        state = self._requests[output.request_id]
        if output.cached_tokens is not None:
            state.cached_tokens = output.cached_tokens
            self._answered(state, self._network_s, planned=state.prefill == state.decode)
        self._chosen(state, output, self._network_s)

    def more(self, request_id: str, token_ids: Sequence[int], chosen_s: Sequence[float]) -> None:
        """A combined worker has sampled a request's next tokens at these times, and the request goes on."""
        state, after_s = self._requests[request_id], self._network_s
        state.times_s += [time_s + after_s for time_s in chosen_s]
        state.token_ids += token_ids

    def _first_by_other(self, state: RequestState, output: Output, cached_tokens: int) -> None:
        state.remote, state.cached_tokens = True, cached_tokens
        self._answered(state, 2 * self._network_s, planned=True)
        self._chosen(state, output, 2 * self._network_s)

    def _chosen(self, state: RequestState, output: Output, after_s: float) -> None:
        state.times_s.append(self._events.now + after_s)
        state.token_ids += output.token_ids
        if output.finish is not None:
            del self._requests[state.request.id]
            self._loads[state.decode].sequences_ended(1)
            self.learning.answer("", len(state.token_ids))
            if state.measured is not None:
                self.meter.answered(state.measured, len(state.token_ids))
            state.on_end(state, output.finish)

    def _answered(self, state: RequestState, after_s: float, *, planned: bool) -> None:
        """The first token is on its way. `planned`: the prompt was computed where the placement said."""
        estimate, placement, now = self._loads[state.prefill], state.placement, self._events.now
        estimate.prompt_answered(state.number)
        if planned and placement is not None:
            actual_ms = (now + after_s - state.placed_at) * 1e3
            self.learning.first_token(estimate.errors, placement, actual_ms, now)

    def _refused(self, state: RequestState) -> None:
        state.queues_full += 1
        self._again(state)

    def _rerouted(self, state: RequestState, placement: Placement) -> None:
        state.failed_prefill |= {one.worker_id for one in placement.prefill}
        self._again(state)

    def _again(self, state: RequestState) -> None:
        self._loads[state.prefill].prompt_answered(state.number)
        self._loads[state.decode].sequences_ended(1)
        state.refused_by.add(state.decode)
        self.submit(state)

    def fleet(self) -> Fleet:
        """The workers, as the planner sees them."""
        loads = [self._loads[worker.id].candidate for worker in self._workers.values()]
        shown = loads[:: -(-len(loads) // PROFILES)]
        return Fleet(
            len(loads),
            [one.estimator.colocation for one in shown],
            [one.estimator.slowdown for one in shown],
            loads[0].max_num_seqs,
            loads[0].num_pages,
        )

    def _measure(self, seen: Situation) -> RequestClass:
        tokens, cached = seen.prompt.tokens, seen.cached.cached
        best = max((cached.get(one.worker_id, 0) for one in seen.combined), default=0)
        mean = sum(cached.values()) / len(self._workers)
        return self.meter.arrived(tokens, tokens - BLOCK_SIZE * best, round(tokens - BLOCK_SIZE * mean), seen.now)

    def _candidates(self, role: str, but: set[str] | frozenset[str]) -> list[Candidate]:
        return [
            self._loads[worker.id].candidate
            for worker in self._workers.values()
            if worker.role == role and worker.id not in but
        ]

    def _follow(self, worker: SimWorker) -> WorkerLoad:
        hello = pb.Hello(
            worker_id=worker.id,
            num_pages=worker.num_pages,
            max_num_seqs=worker.engine.max_num_seqs,
            page_bytes=worker.model.profile.page_bytes,
            profile=worker.model.profile.model_dump_json(by_alias=True).encode(),
            token_budget=worker.token_budget,
            colocate=worker.colocate,
            decode_shares=worker.decode_shares,
        )
        errors = self.learning.worker(prefills_only=worker.role == "prefill")
        estimate = WorkerLoad(hello, worker.id, itl_ms=self._targets.slo_itl_ms, errors=errors)
        self._index.reset(worker.id)

        def load(report: pb.Load) -> None:
            self._on_load(worker, report)
            self._events.after(self._network_s, arrived, report)

        def arrived(report: pb.Load) -> None:
            estimate.on_report(report, self._events.now)

        worker.on_load = load
        worker.on_events = lambda events: self._events.after(self._network_s, self._cache_changed, worker.id, events)
        return estimate

    def _cache_changed(self, worker_id: str, events: list[CacheEvent]) -> None:
        for event in events:
            self._index.move(worker_id, short_hashes(event.hashes), event.tier)

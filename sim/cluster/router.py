"""The router's part: what it knows of the workers, and where it sends requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from cpd.common.blocks import BLOCK_SIZE, short_hashes
from cpd.rpc import cpd_pb2 as pb
from engine.types import CacheEvent, Finish, Output, Request
from router.placement.candidate import Candidate
from router.placement.costs import PolicySettings, Prompt
from router.placement.policy import Placement
from router.placement.worker_load import WorkerLoad
from router.prefix_index.index import PrefixIndex
from sim.cluster.events import Events
from sim.cluster.fills import DecodeSide, Order
from sim.cluster.policies import Place, Situation
from sim.cluster.worker import SimWorker


@dataclass(eq=False, slots=True)
class Flight:
    """A request under way.

    Attributes:
        number: Names it.
        on_end: Called when the last token was chosen.
        on_refused: Called when no worker takes it.
        token_ids: The answer so far.
        times_s: When the router has each of them.
        cached_tokens: Prompt tokens that came from a cache, once it is known.
        remote: Whether a prefill worker computed the prompt, once it is known.
        decode, prefill: The workers that it was sent to last; the same one where it is computed locally.
        placement, placed_at: The last one, and when that was.
        refused_by: Workers that had no room for it.
    """

    number: int
    request: Request
    on_end: Callable[["Flight", Finish], None]
    on_refused: Callable[["Flight"], None]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    remote: bool = False
    decode: str = ""
    prefill: str = ""
    placement: Placement | None = None
    placed_at: float = 0.0
    refused_by: set[str] = field(default_factory=set)


class SimRouter:
    """One router with sessions to all workers.

    Args:
        place: Decides.
        sides: Of the combined workers, by name.
        network_s: Between the router and a worker.
        on_load: Told of every load report.
    """

    def __init__(
        self,
        place: Place,
        settings: PolicySettings,
        workers: Sequence[SimWorker],
        sides: Mapping[str, DecodeSide],
        events: Events,
        network_s: float,
        seed: int,
        on_load: Callable[[SimWorker, pb.Load], None],
    ) -> None:
        self._place = place
        self._settings = settings
        self._sides = sides
        self._events = events
        self._network_s = network_s
        self._rng = Random(seed)
        self._on_load = on_load
        self._flights: dict[str, Flight] = {}  # by the request's id
        self._index = PrefixIndex()
        self._workers = {worker.id: worker for worker in workers}
        self._loads = {worker.id: self._follow(worker) for worker in workers}

    def submit(self, flight: Flight) -> None:
        """Places a request and sends it to its worker."""
        request, now = flight.request, self._events.now
        self._flights[request.id] = flight
        cached = self._index.cached_prefixes(request.block_hashes).cached
        seen = Situation(
            Prompt(len(request.token_ids), request.params.max_tokens),
            self._candidates("combined", flight.refused_by),
            self._candidates("prefill", frozenset()),
            cached,
            self._settings,
            now,
            self._rng,
        )
        placement = self._place(seen) if seen.combined else None
        if placement is None:
            del self._flights[request.id]
            flight.on_refused(flight)
            return
        flight.decode, flight.prefill = placement.decode.worker_id, placement.prompt_worker.worker_id
        flight.placement, flight.placed_at = placement, now
        self._loads[flight.decode].sequences_started(1)
        self._loads[flight.prefill].prompt_sent(flight.number, self._prefill_ms(placement, request, cached), now)
        order = Order(
            request,
            prefill=tuple(self._workers[one.worker_id] for one in placement.prefill),
            prefix_source=self._workers[placement.prefix_source.worker_id] if placement.prefix_source else None,
            long_prefill_tokens=placement.long_prefill_tokens,
            on_first=lambda output, tokens: self._first_by_other(flight, output, tokens),
            on_refused=lambda: self._events.at(self._events.now + self._network_s, self._refused, flight),
        )
        self._events.at(now + self._network_s, self._sides[flight.decode].take, order)

    def output(self, output: Output) -> None:
        """A combined worker has chosen a request's next token."""
        flight = self._flights[output.request_id]
        if output.cached_tokens is not None:
            flight.cached_tokens = output.cached_tokens
            self._answered(flight, self._network_s, planned=flight.prefill == flight.decode)
        self._chosen(flight, output, self._network_s)

    def more(self, request_id: str, token_ids: Sequence[int], chosen_s: Sequence[float]) -> None:
        """A combined worker has chosen a request's next tokens at these times, and more are to come."""
        flight, after_s = self._flights[request_id], self._network_s
        flight.times_s += [time_s + after_s for time_s in chosen_s]
        flight.token_ids += token_ids

    def _first_by_other(self, flight: Flight, output: Output, cached_tokens: int) -> None:
        flight.remote, flight.cached_tokens = True, cached_tokens
        self._answered(flight, 2 * self._network_s, planned=True)
        self._chosen(flight, output, 2 * self._network_s)

    def _chosen(self, flight: Flight, output: Output, after_s: float) -> None:
        flight.times_s.append(self._events.now + after_s)
        flight.token_ids += output.token_ids
        if output.finish is not None:
            del self._flights[flight.request.id]
            self._loads[flight.decode].sequences_ended(1)
            flight.on_end(flight, output.finish)

    def _answered(self, flight: Flight, after_s: float, *, planned: bool) -> None:
        """The first token is on its way; `planned`: it was computed where it was to be."""
        estimate, placement, now = self._loads[flight.prefill], flight.placement, self._events.now
        estimate.prompt_answered(flight.number)
        if planned and placement is not None and placement.predicted:
            actual_ms = (now + after_s - flight.placed_at) * 1e3
            estimate.ttft_errors.add(placement.chosen.ttft_ms, actual_ms, placement.prompt_worker.tardiness, now)

    def _refused(self, flight: Flight) -> None:
        self._loads[flight.prefill].prompt_answered(flight.number)
        self._loads[flight.decode].sequences_ended(1)
        flight.refused_by.add(flight.decode)
        self.submit(flight)

    def _candidates(self, role: str, but: set[str] | frozenset[str]) -> list[Candidate]:
        return [
            self._loads[worker.id].candidate
            for worker in self._workers.values()
            if worker.role == role and worker.id not in but
        ]

    @staticmethod
    def _prefill_ms(placement: Placement, request: Request, cached: Mapping[str, int]) -> float:
        if placement.predicted:
            return placement.chosen.cost.prefill_ms
        worker = placement.prefill[0] if placement.prefill else placement.decode
        before = cached.get(worker.worker_id, 0) * BLOCK_SIZE
        return worker.prefill(max(1, len(request.token_ids) - before), before).ms

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
        estimate = WorkerLoad(hello, worker.id, itl_ms=self._settings.slo_itl_ms)
        self._index.reset(worker.id)

        def load(report: pb.Load) -> None:
            self._on_load(worker, report)
            self._events.at(self._events.now + self._network_s, arrived, report)

        def arrived(report: pb.Load) -> None:
            estimate.on_report(report, self._events.now)

        worker.on_load = load
        worker.on_events = lambda events: self._events.at(
            self._events.now + self._network_s, self._cache_changed, worker.id, events
        )
        return estimate

    def _cache_changed(self, worker_id: str, events: list[CacheEvent]) -> None:
        for event in events:
            self._index.move(worker_id, short_hashes(event.hashes), event.tier)

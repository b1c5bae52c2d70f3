"""Remote prefills and prefix fetches between simulated workers.

    combined worker D                              prefill worker P
    look: much is uncached ────── request ───────▶ queued, computed chunk by chunk
      that prefix is on its way: wait, look again     │ first chunk begins
    reserve pages, in the order of asking ◀─ ready ──┤
      └──────────────────────────────── landing ────▶ finished pages leave after each chunk
    first token goes on at once  ◀──── first token ──┤
    all pages here: decode ◀───────── pages ─────────┘

This follows prefill_coordinator.py, remote_prefill.py, prefix_fetch.py and prefix_job.py in decode_worker/ and
prefill_job.py in prefill_worker/. Workers and transfers never fail here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import QueueFullError
from cpd.performance.model import PerfModel
from engine.engine import Engine
from engine.types import Output, Request, Reservation, StepOutput
from prefill_worker.prefill_job import FinishedPages, PagesToSend
from sim.cluster.worker import SimWorker
from sim.events import Events

Done = Callable[[], None]


class Links:
    """The workers' network links. A link sends one transfer at a time, and receives one.

    Args:
        model: Predicts transfer times.
        page_bytes: Size of a page.
    """

    def __init__(self, events: Events, model: PerfModel, page_bytes: int) -> None:
        self._events = events
        self._fixed_s = model.transfer_ms(0) / 1e3
        self._page_s = (model.transfer_ms(page_bytes) - model.transfer_ms(0)) / 1e3
        self._free_s: dict[tuple[str, str], float] = {}

    def push(self, sender: str, receiver: str, pages: int, done: Done) -> None:
        """Sends pages and calls `done` when they arrive."""
        out, into = (sender, "out"), (receiver, "in")
        start_s = max(self._events.now, self._free_s.get(out, 0.0), self._free_s.get(into, 0.0))
        end_s = start_s + pages * self._page_s
        self._free_s[out] = self._free_s[into] = end_s
        self._events.at(end_s + self._fixed_s, done)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request with the router's placement.

    Attributes:
        prefill: Prefill workers in the order to try; empty: the combined worker computes the prompt.
        prefix_source: Combined worker from whose cache the first blocks may be fetched; only without prefill workers.
        long_prefill_tokens: Up to this many uncached tokens are computed locally in any case.
        on_first: Called when P has the first token, with that token and the number of cached prompt tokens.
        on_refused: Called if the combined worker's queue is full.
        on_rerouted: Called if no prefill worker takes the prompt.
    """

    request: Request
    prefill: tuple[SimWorker, ...]
    prefix_source: SimWorker | None
    long_prefill_tokens: int
    on_first: Callable[[Output, int], None]
    on_refused: Done
    on_rerouted: Done


class DecodeSide:
    """Handles requests on the worker that decodes them before they enter its engine.

    Args:
        network_s: Delay of a message between workers.
        prefill_sides: All workers' counterparts, by name.
    """

    def __init__(
        self, worker: SimWorker, events: Events, links: Links, network_s: float, prefill_sides: "dict[str, PrefillSide]"
    ) -> None:
        self.worker = worker
        self.links = links
        self._events = events
        self._network_s = network_s
        self._prefill_sides = prefill_sides
        self._arriving: dict[bytes, list[Done]] = {}
        self._reserving: deque[RemotePrefill] = deque()

    def deliver(self, call: Callable[..., None], *args: Any) -> None:
        """Calls after the network's delay."""
        self._events.after(self._network_s, call, *args)

    def take(self, placed: PlacedRequest, tried: int = 0) -> None:
        """Takes a request that `tried` prefill workers have refused, or whose prefix fetch has ended."""
        self.worker.attempt(lambda engine: self._look(engine, placed, tried))

    def want_pages(self, remote: "RemotePrefill") -> None:
        """Reserves pages for a remote prefill, in order of arrival, once the engine can spare them."""
        self._reserving.append(remote)
        self.worker.attempt(lambda engine: self._reserve(engine, remote))

    def over(self, missing: bytes) -> None:
        """Ends the wait for this block: the prefill or fetch that would bring it has ended."""
        for look_again in self._arriving.pop(missing, []):
            look_again()

    def _look(self, engine: Engine, placed: PlacedRequest, tried: int) -> bool:
        request = placed.request
        uncached = engine.uncached_tokens(request)
        source = placed.prefix_source if tried == 0 else None
        if not (placed.prefill or source) or uncached <= placed.long_prefill_tokens:
            self._add(engine, placed)
            return True
        if engine.block_to_wait_for(request):
            return False
        missing = self._missing(request, uncached)
        if missing in self._arriving:
            self._arriving[missing].append(lambda: self.take(placed, tried))
        elif source is not None:
            self._arriving[missing] = []
            fetch = PrefixFetch(placed, self, source, missing)
            self.deliver(fetch.ask)
        elif tried == len(placed.prefill):
            placed.on_rerouted()
        else:
            if missing:
                self._arriving[missing] = []
            prefill = self._prefill_sides[placed.prefill[tried].id]
            remote = RemotePrefill(placed, self, prefill, tried, missing, len(request.token_ids) - uncached)
            self.deliver(prefill.take, remote)
        return True

    def _add(self, engine: Engine, placed: PlacedRequest) -> None:
        try:
            engine.add(placed.request)
        except QueueFullError:
            placed.on_refused()

    def _reserve(self, engine: Engine, remote: "RemotePrefill") -> bool:
        if self._reserving[0] is not remote:
            return False
        reservation = engine.landings.reserve(remote.placed.request)
        if reservation is None:
            return False
        self._reserving.popleft()
        remote.reservation = reservation
        self.deliver(remote.landed)
        return True

    def reserve_now(self, engine: Engine, request: Request, blocks: int) -> Reservation | None:
        """Reserves pages for the first blocks of a prompt, unless others wait for pages."""
        return None if self._reserving else engine.landings.reserve(request, blocks)

    @staticmethod
    def _missing(request: Request, uncached: int) -> bytes:
        """Returns the hash of the first full block that is not cached; empty if there is none."""
        first = (len(request.token_ids) - uncached) // BLOCK_SIZE
        return request.block_hashes[first] if first < len(request.block_hashes) else b""


@dataclass(eq=False, slots=True)
class PrefixFetch:
    """A fetch of a prompt's first blocks from another combined worker's cache.

    Attributes:
        missing: Hash of the first block that D lacks.
    """

    placed: PlacedRequest
    decode: DecodeSide
    source: SimWorker
    missing: bytes
    _pinned: list[int] = field(default_factory=list)

    def ask(self) -> None:
        """Asks the source to pin the blocks."""
        self.source.do(self._pin)

    def _pin(self, engine: Engine) -> None:
        self._pinned = engine.pin_cached(self.placed.request.block_hashes)
        self.decode.deliver(lambda: self.decode.worker.do(self._reserve))

    def _reserve(self, engine: Engine) -> None:
        blocks = len(self._pinned)
        reservation = self.decode.reserve_now(engine, self.placed.request, blocks) if blocks else None
        self.decode.deliver(self._unpin if reservation is None else lambda: self._push(reservation))
        if reservation is None:
            self._over()

    def _push(self, reservation: Reservation) -> None:
        def arrived() -> None:
            self._unpin()
            self.decode.worker.do(lambda engine: engine.landings.add_to_cache(reservation, self.placed.request))
            self._over()

        self.decode.links.push(self.source.id, self.decode.worker.id, len(reservation.pages), arrived)

    def _unpin(self) -> None:
        self.source.do(lambda engine: engine.unpin(self._pinned))

    def _over(self) -> None:
        self.decode.over(self.missing)
        self.decode.take(self.placed, 1)


class PrefillSide:
    """Handles remote prefills on the worker that computes them."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._remotes: dict[str, RemotePrefill] = {}
        worker.on_begin = self._begin

    def take(self, remote: "RemotePrefill") -> None:
        """Queues a prompt in the engine."""

        def add(engine: Engine) -> None:
            request = replace(remote.placed.request, prefill_only=True)
            try:
                engine.add(request)
            except QueueFullError:
                remote.refused()
                return
            self._remotes[request.id] = remote

        self.worker.do(add)

    def take_outputs(self, output: StepOutput) -> list[Output]:
        """Handles what a step has computed for remote prefills. Returns the outputs of the worker's own streams."""
        for computed in output.computed:
            remote = self._remotes[computed.request_id]
            remote.computed(remote.to_push.take(self.worker.engine, computed))
        if not self._remotes:
            return output.outputs
        own = []
        for one in output.outputs:
            if one.request_id in self._remotes:
                self._remotes.pop(one.request_id).first(one)
            else:
                own.append(one)
        return own

    def _begin(self, output: StepOutput) -> None:
        for computed in output.computed:
            self._remotes[computed.request_id].begin()


@dataclass(eq=False, slots=True)
class RemotePrefill:
    """One prompt that a prefill worker P computes for a combined worker D.

    Attributes:
        missing: Hash of the first block that D lacks; empty: none.
        cached_tokens: Prompt tokens in D's cache.
        reservation: D's pages, once reserved.
    """

    placed: PlacedRequest
    decode: DecodeSide
    prefill: PrefillSide
    tried: int
    missing: bytes
    cached_tokens: int
    reservation: Reservation | None = None
    to_push: PagesToSend = field(init=False)
    _ready: bool = False
    _landed: bool = False
    _unlanded: list[FinishedPages] = field(default_factory=list)
    _left: int = -1
    _first: Output | None = None

    def __post_init__(self) -> None:
        self.to_push = PagesToSend(self.placed.request)

    def refused(self) -> None:
        """P's queue is full: D tries the next prefill worker."""
        self.decode.deliver(self._next)

    def begin(self) -> None:
        """The first chunk begins: D reserves pages."""
        if not self._ready:
            self._ready = True
            self.decode.deliver(self.decode.want_pages, self)

    def computed(self, chunk: FinishedPages) -> None:
        """A chunk is computed, and its finished pages are pinned."""
        if self._landed:
            self._push(chunk)
        else:
            self._unlanded.append(chunk)

    def first(self, output: Output) -> None:
        """P has sampled the first token."""
        cached = min(max(self.cached_tokens, output.cached_tokens or 0), self.placed.request.prompt_len)
        self.placed.on_first(output, cached)
        self.decode.deliver(self._first_arrived, output)

    def landed(self) -> None:
        """P has the landing."""
        assert self.reservation is not None
        self._landed, self._left = True, len(self.reservation.pages)
        for chunk in self._unlanded:
            self._push(chunk)
        self._unlanded.clear()
        self._activate_if_complete()

    def _push(self, chunk: FinishedPages) -> None:
        """Pushes the pages that D lacks."""
        assert self.reservation is not None
        there = min(max(self.reservation.first_block - chunk.first_block, 0), len(chunk.pages))
        pages = len(chunk.pages) - there
        if not pages:
            self._unpin(chunk.pages)
            return

        def arrived() -> None:
            self._unpin(chunk.pages)
            self._left -= pages
            self._activate_if_complete()

        self.decode.links.push(self.prefill.worker.id, self.decode.worker.id, pages, arrived)

    def _unpin(self, pages: list[int]) -> None:
        if pages:
            self.prefill.worker.do(lambda engine: engine.unpin(pages))

    def _first_arrived(self, output: Output) -> None:
        self._first = output
        self._activate_if_complete()

    def _activate_if_complete(self) -> None:
        reservation, first = self.reservation, self._first
        if first is None or reservation is None or self._left:
            return
        if first.finish is None:
            self.decode.worker.do(lambda engine: engine.landings.activate(reservation, self.placed.request, [first]))
        else:
            self.decode.worker.do(lambda engine: engine.landings.cancel(reservation, quarantine=False))
        self.decode.over(self.missing)

    def _next(self) -> None:
        self.decode.over(self.missing)
        self.decode.take(self.placed, self.tried + 1)

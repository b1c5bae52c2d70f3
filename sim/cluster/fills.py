"""Prompts that another worker computes, or has a part of: what the workers do for each other in virtual time.

    decode worker D                                prefill worker P
    look: much is uncached ────── request ───────▶ queued, computed chunk by chunk
      somebody fills that prefix: wait, look again    │ first chunk begins
    reserve pages, in the order of asking ◀─ ready ──┤
      └──────────────────────────────── landing ────▶ finished pages leave after every chunk
    first token goes on at once  ◀──── first token ──┤
    all pages here: decode ◀───────── pages ─────────┘

It follows decode_worker/route.py, decode_worker/remote_prefill.py and prefill_worker/prefill_job.py, and where another
decode worker's cache gives the first blocks decode_worker/prefix_fetch.py and decode_worker/served_prefix.py; what can
go wrong on real machines (workers that die, transfers that break) does not happen here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import QueueFullError
from cpd.performance.model import PerfModel
from engine.engine import Engine
from engine.types import Output, Request, Reservation, StepOutput
from prefill_worker.prefill_job import Chunk, PagesToPush
from sim.cluster.events import Events
from sim.cluster.worker import SimWorker

Done = Callable[[], None]


class Links:
    """The workers' network links, one each: a link sends one transfer at a time, and receives one.

    Args:
        model: Times transfers.
        page_bytes: Of one page.
    """

    def __init__(self, events: Events, model: PerfModel, page_bytes: int) -> None:
        self._events = events
        self._fixed_s = model.transfer_ms(0) / 1e3
        self._page_s = (model.transfer_ms(page_bytes) - model.transfer_ms(0)) / 1e3
        self._free_s: dict[tuple[str, str], float] = {}

    def push(self, sender: str, receiver: str, pages: int, done: Done) -> None:
        """Sends pages; `done` is called when they are there."""
        out, into = (sender, "out"), (receiver, "in")
        start_s = max(self._events.now, self._free_s.get(out, 0.0), self._free_s.get(into, 0.0))
        end_s = start_s + pages * self._page_s
        self._free_s[out] = self._free_s[into] = end_s
        self._events.at(end_s + self._fixed_s, done)


@dataclass(frozen=True, slots=True)
class Order:
    """A request, and who may help with its prompt.

    Attributes:
        prefill: Prefill workers in the order to try; empty: the decode worker does it.
        prefix_source: A combined worker from which the first blocks may be fetched; only without prefill workers.
        long_prefill_tokens: What the decode worker may compute itself, where there are some of these.
        on_first: Called with the first token and the prompt tokens that came from a cache, when P has it.
        on_refused: Called where no worker's queue has room.
    """

    request: Request
    prefill: tuple[SimWorker, ...]
    prefix_source: SimWorker | None
    long_prefill_tokens: int
    on_first: Callable[[Output, int], None]
    on_refused: Done


class DecodeSide:
    """What a decode worker does with requests before its engine has them.

    Args:
        network_s: From worker to worker.
        prefill_sides: Of the prefill workers, by name.
    """

    def __init__(
        self, worker: SimWorker, events: Events, links: Links, network_s: float, prefill_sides: "dict[str, PrefillSide]"
    ) -> None:
        self.worker = worker
        self.events = events
        self.links = links
        self.network_s = network_s
        self._prefill_sides = prefill_sides
        self._filling: dict[bytes, list[Done]] = {}
        self._reserving: deque[Fill] = deque()

    def take(self, order: Order, tried: int = 0) -> None:
        """Takes a request; the first `tried` prefill workers refused it, or the other cache was asked."""
        self.worker.attempt(lambda engine: self._look(engine, order, tried))

    def want_pages(self, fill: "Fill") -> None:
        """Reserves pages for a fill when it is its turn and the engine can spare them."""
        self._reserving.append(fill)
        self.worker.attempt(lambda engine: self._reserve(engine, fill))

    def over(self, missing: bytes) -> None:
        """A fill that was to bring this block has ended: who waited for it looks again."""
        for look_again in self._filling.pop(missing, []):
            look_again()

    def _look(self, engine: Engine, order: Order, tried: int) -> bool:
        request = order.request
        uncached = engine.uncached_tokens(request)
        source = order.prefix_source if tried == 0 else None
        if not (order.prefill or source) or uncached <= order.long_prefill_tokens:
            self._add(engine, order)
            return True
        if engine.pending(request):
            return False
        missing = self._missing(request, uncached)
        if missing in self._filling:
            self._filling[missing].append(lambda: self.take(order, tried))
        elif source is not None:
            self._filling[missing] = []
            prefix = Prefix(order, self, source, missing)
            self.events.at(self.events.now + self.network_s, prefix.ask)
        elif tried == len(order.prefill):
            order.on_refused()
        else:
            if missing:
                self._filling[missing] = []
            prefill = self._prefill_sides[order.prefill[tried].id]
            fill = Fill(order, self, prefill, tried, missing, len(request.token_ids) - uncached)
            self.events.at(self.events.now + self.network_s, prefill.take, fill)
        return True

    def _add(self, engine: Engine, order: Order) -> None:
        try:
            engine.add(order.request)
        except QueueFullError:
            order.on_refused()

    def _reserve(self, engine: Engine, fill: "Fill") -> bool:
        if self._reserving[0] is not fill:
            return False
        reservation = engine.reserve(fill.order.request)
        if reservation is None:
            return False
        self._reserving.popleft()
        fill.reservation = reservation
        self.events.at(self.events.now + self.network_s, fill.landed)
        return True

    def reserve_now(self, engine: Engine, request: Request, blocks: int) -> Reservation | None:
        """For the first blocks of a prompt, unless others wait for pages."""
        return None if self._reserving else engine.reserve(request, blocks)

    @staticmethod
    def _missing(request: Request, uncached: int) -> bytes:
        """The first full block that the cache lacks; empty: there is none."""
        first = (len(request.token_ids) - uncached) // BLOCK_SIZE
        return request.block_hashes[first] if first < len(request.block_hashes) else b""


@dataclass(eq=False, slots=True)
class Prefix:
    """The first blocks of a prompt on their way from another decode worker's cache.

    Attributes:
        missing: The first block that D lacks.
    """

    order: Order
    decode: DecodeSide
    source: SimWorker
    missing: bytes
    _pinned: list[int] = field(default_factory=list)

    def ask(self) -> None:
        """The source hears of it."""
        self.source.do(self._pin)

    def _pin(self, engine: Engine) -> None:
        self._pinned = engine.pin_cached(self.order.request.block_hashes)
        self._later(lambda: self.decode.worker.do(self._reserve))

    def _reserve(self, engine: Engine) -> None:
        blocks = len(self._pinned)
        reservation = self.decode.reserve_now(engine, self.order.request, blocks) if blocks else None
        self._later(self._unpin if reservation is None else lambda: self._push(reservation))
        if reservation is None:
            self._over()

    def _push(self, reservation: Reservation) -> None:
        def arrived() -> None:
            self._unpin()
            self.decode.worker.do(lambda engine: engine.fill_cache(reservation, self.order.request))
            self._over()

        self.decode.links.push(self.source.id, self.decode.worker.id, len(reservation.pages), arrived)

    def _unpin(self) -> None:
        self.source.do(lambda engine: engine.unpin(self._pinned))

    def _over(self) -> None:
        self.decode.over(self.missing)
        self.decode.take(self.order, 1)

    def _later(self, then: Done) -> None:
        self.decode.events.at(self.decode.events.now + self.decode.network_s, then)


class PrefillSide:
    """What a prefill worker does with fills, beside computing them."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._fills: dict[str, Fill] = {}
        worker.on_begin = self._begin
        worker.on_output = self._see

    def take(self, fill: "Fill") -> None:
        """Queues a prompt in the engine."""

        def add(engine: Engine) -> None:
            request = replace(fill.order.request, prefill_only=True)
            try:
                engine.add(request)
            except QueueFullError:
                fill.refused()
                return
            self._fills[request.id] = fill

        self.worker.do(add)

    def _begin(self, output: StepOutput) -> None:
        for computed in output.computed:
            self._fills[computed.request_id].begin()

    def _see(self, output: StepOutput) -> None:
        for computed in output.computed:
            fill = self._fills[computed.request_id]
            fill.computed(fill.to_push.take(self.worker.engine, computed))
        for first in output.outputs:
            self._fills.pop(first.request_id).first(first)


@dataclass(eq=False, slots=True)
class Fill:
    """One prompt on its way.

    Attributes:
        missing: The first block that D lacks; empty: none.
        cached_tokens: What D has cached.
        reservation: D's, when it has one.
    """

    order: Order
    decode: DecodeSide
    prefill: PrefillSide
    tried: int
    missing: bytes
    cached_tokens: int
    reservation: Reservation | None = None
    to_push: PagesToPush = field(init=False)
    _asked: bool = False
    _landed: bool = False
    _unlanded: list[Chunk] = field(default_factory=list)
    _left: int = -1
    _first: Output | None = None

    def __post_init__(self) -> None:
        self.to_push = PagesToPush(self.order.request)

    def refused(self) -> None:
        """P's queue is full: the next one's turn."""
        self.decode.events.at(self.decode.events.now + self.decode.network_s, self._next)

    def begin(self) -> None:
        """A chunk is being computed: D is to say where the pages go."""
        if not self._asked:
            self._asked = True
            self.decode.events.at(self.decode.events.now + self.decode.network_s, self.decode.want_pages, self)

    def computed(self, chunk: Chunk) -> None:
        """A chunk has been computed, and its finished pages are pinned."""
        if self._landed:
            self._push(chunk)
        else:
            self._unlanded.append(chunk)

    def first(self, output: Output) -> None:
        """P has chosen the first token."""
        cached = min(max(self.cached_tokens, output.cached_tokens or 0), self.order.request.prompt_len)
        self.order.on_first(output, cached)
        self.decode.events.at(self.decode.events.now + self.decode.network_s, self._first_arrived, output)

    def landed(self) -> None:
        """P knows where the pages go."""
        assert self.reservation is not None
        self._landed, self._left = True, len(self.reservation.pages)
        for chunk in self._unlanded:
            self._push(chunk)
        self._unlanded.clear()
        self._activate_if_complete()

    def _push(self, chunk: Chunk) -> None:
        """Sends the pages that D lacks."""
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
            self.decode.worker.do(lambda engine: engine.activate(reservation, self.order.request, [first]))
        else:
            self.decode.worker.do(lambda engine: engine.cancel(reservation, quarantine=False))
        self.decode.over(self.missing)

    def _next(self) -> None:
        self.decode.over(self.missing)
        self.decode.take(self.order, self.tried + 1)

"""One try to have one prefill worker fill a prompt's pages, as the decode worker sees it.

`decode_worker.prefix_fetch` has another worker's cache fill some of them: the same states, without first tokens.

States, and what is held in each:

    CONNECTING   called, nothing heard yet                                  nothing
    QUEUED       waits in the prefill worker's queue                        nothing
    RESERVING    the prefill worker computes, own pages are not ready:      first nothing, then a place in the
                 what host memory keeps comes back, then the rest is        reservation queue
                 reserved
    LANDED       it knows where the pages go, pushes them, says which       reservation, landing
    DECIDED      `outcome` is known

The first tokens come in RESERVING or LANDED and are passed on at once. With the outcome, the reservation is somebody
else's or nobody's:

    COMPLETE     all pages are here, as they were sent: the engine has them (the engine's)
    FINISHED     the first tokens were the last: the push is cancelled      (cancelled)
    FAILED       refused, broken, silent for too long: the next one's turn  (cancelled)
    CANCELLED    nobody wants the result any more                           (cancelled)

A cancelled reservation's pages are free at once when the landing could be revoked: nothing is being written into them.
Else they are in quarantine, and the fill lives on, without anybody waiting for it, until the prefill worker says that
nothing is in flight, or the transport proves it. The task that runs a fill is never cancelled before that.

Two clocks run until the outcome is known. A prefill worker whose process runs says something every second: one that is
silent for SILENT_S is stopped or cut off. One that only says that it runs, for `fill_progress_s`, hangs.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cpd.common.blocks import pack_tokens
from cpd.common.errors import TransferError
from cpd.rpc import cpd_pb2 as pb
from decode_worker.arrivals import Arrivals
from decode_worker.landing_queue import ReservationQueue, Wanted
from decode_worker.outcome import Failure, Outcome, Status
from engine.types import Output, Request, Reservation
from kvtransfer.base import Landing
from worker.channels import StreamEnded
from worker.convert import InvalidRequestError, deadline_ms_to_wire, first_outputs_from_wire, sampling_to_wire
from worker.engine_bridge import EngineDiedError
from worker.node import Node

log = logging.getLogger(__name__)

SILENT_S = 3.0
"""A prefill worker that says nothing for so long is given up: three of its heartbeats."""


class State(Enum):
    """See the table above."""

    CONNECTING = auto()
    QUEUED = auto()
    RESERVING = auto()
    LANDED = auto()
    DECIDED = auto()


@dataclass(frozen=True, slots=True)
class _Reserved:
    result: "asyncio.Future[Reservation | bool]"


@dataclass(frozen=True, slots=True)
class _PagesArrived:
    error: TransferError | None


class _Signal(Enum):
    CANCEL = auto()
    SILENCE = auto()
    STALL = auto()
    PEER_GONE = auto()


_Event = pb.FillEvent | StreamEnded | _Reserved | _PagesArrived | _Signal


class Fill:
    """See the module's tables.

    Args:
        request: What is to be prefilled.
        candidate: By whom.
        cached_tokens: How much of it is in the own cache.
        on_first: Called once with the first tokens, and with how they came.
        open_choices: The choices that somebody still wants.

    Attributes:
        outcome: Resolved when it is known.
        state: Where it is.
    """

    def __init__(
        self,
        request: Request,
        candidate: pb.PrefillCandidate | pb.PrefixSource,
        *,
        cached_tokens: int,
        node: Node,
        reservations: ReservationQueue,
        on_first: Callable[[Sequence[Output], pb.Prefilled], None],
        open_choices: Callable[[], Collection[int]],
    ) -> None:
        self.state = State.CONNECTING
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._request = request
        self._candidate = candidate
        self._cached_tokens = cached_tokens
        self._node = node
        self._reservations = reservations
        self._on_first = on_first
        self._open_choices = open_choices
        self._cancelled = False
        self._inbox: asyncio.Queue[_Event] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self._heard_by = 0.0  # loop times
        self._moves_by = 0.0
        self._wanted: Wanted | None = None
        self._reserving: asyncio.Future[Reservation | bool] | None = None
        self._reservation: Reservation | None = None
        self._landing: Landing | None = None
        self._arrivals: Arrivals | None = None
        self._first: list[Output] = []
        self._arrived = False
        self._released = False

    def cancel(self) -> None:
        """Nobody wants the result any more. Idempotent."""
        if not self._cancelled:
            self._cancelled = True
            self._inbox.put_nowait(_Signal.CANCEL)

    async def run(self) -> None:
        """Runs the fill to its outcome, and on until no page of it is in danger."""
        try:
            with self._node.channels.fill(self._candidate.address, self._inbox.put_nowait) as self._send:
                try:
                    await self._until_decided()
                except EngineDiedError:
                    raise
                except Exception as error:
                    log.exception("fill of %s by %s failed unexpectedly", self._request.id, self._candidate.worker_id)
                    await self._fail(Failure.INTERNAL, repr(error))
                if self._reservation is not None:
                    await self._settle(self._reservation)
                elif self.outcome.result().status is Status.COMPLETE:
                    await self._until_released()
        except EngineDiedError as error:
            self._decide(Outcome(Status.FAILED, str(error), Failure.INTERNAL, self._first))
        except Exception as error:
            log.exception("fill of %s by %s can't be ended in order", self._request.id, self._candidate.worker_id)
            self._decide(Outcome(Status.FAILED, repr(error), Failure.INTERNAL, self._first))
        finally:
            for watcher in self._watchers:
                watcher.cancel()

    # ---- until the outcome is known ----

    async def _until_decided(self) -> None:
        self._send(pb.FillRequest(start=self._start()))
        self._moved()
        while not self.outcome.done():
            event = await self._next()
            match event:
                case pb.FillEvent():
                    await self._take(event)
                case _Reserved(result):
                    self._reserving = None
                    if (failure := result.exception()) is not None:
                        await self._fail(Failure.REFUSED, str(failure))
                    else:
                        await self._land(result.result())
                case _PagesArrived(None):
                    self._arrived = True
                case _PagesArrived(error):
                    await self._fail(Failure.TRANSFER, str(error))
                case StreamEnded() if self._released:
                    pass
                case StreamEnded(reason):
                    unheard = self.state is State.CONNECTING
                    await self._fail(Failure.UNREACHABLE if unheard else Failure.LOST, reason)
                case _Signal.SILENCE:
                    await self._fail(Failure.SILENT, f"nothing was heard for {SILENT_S:g} s ({self.state.name})")
                case _Signal.STALL:
                    await self._fail(Failure.STALLED, f"no progress for {self._patience_s:g} s ({self.state.name})")
                case _Signal.CANCEL:
                    await self._give_up(Status.CANCELLED, "cancelled")
            if self._answered and self._arrived and not self.outcome.done():
                await self._use()

    async def _next(self) -> _Event:
        clock = asyncio.get_running_loop().time
        while True:
            deadline = min(self._heard_by, self._moves_by)
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._inbox.get()
            except TimeoutError:
                if clock() - deadline > SILENT_S / 2:  # it was this process that was stopped
                    self._moved()
                    continue
                return _Signal.SILENCE if deadline == self._heard_by else _Signal.STALL

    @property
    def _patience_s(self) -> float:
        """How long nothing may move. What it says it has sent must be here in a moment."""
        patience_s = self._node.settings.fill_progress_s
        return min(patience_s, SILENT_S) if self._released else patience_s

    def _heard(self) -> None:
        """The prefill worker's process runs. It may be silent once it owes nothing more."""
        self._heard_by = math.inf if self._released else asyncio.get_running_loop().time() + SILENT_S

    def _moved(self) -> None:
        """It works."""
        self._moves_by = asyncio.get_running_loop().time() + self._patience_s
        self._heard()

    async def _take(self, event: pb.FillEvent) -> None:
        """One message of the prefill worker, while the outcome is open."""
        kind = event.WhichOneof("kind")
        if self.state is State.CONNECTING:
            self.state = State.QUEUED
        if kind == "alive":
            self._heard()
            return
        self._moved()
        match kind, self.state:
            case "progress", _:
                pass
            case "ready", State.QUEUED:
                await self._reserve(event.ready)
            case "first_tokens", State.RESERVING | State.LANDED if not self._answered:
                await self._take_first(event.first_tokens)
            case "pages", State.LANDED:
                await self._take_pages(event.pages)
            case "released", _:
                self._released = True
                self._moved()
                await self._take_released(event.released)
            case "refused", _:
                self._released = True
                full = event.refused.queue_full
                await self._fail(Failure.QUEUE_FULL if full else Failure.REFUSED, event.refused.message)
            case _:
                await self._fail(Failure.PROTOCOL, f"it sent {kind} in state {self.state.name}")

    @property
    def _answered(self) -> bool:
        """Whether all has come that is to come beside the pages."""
        return bool(self._first)

    async def _reserve(self, ready: pb.FillReady) -> None:
        self._wanted = Wanted(self._request)
        self._await_pages(self._reservations.get(self._wanted))

    def _await_pages(self, reserving: "asyncio.Future[Reservation | bool]") -> None:
        self.state = State.RESERVING
        self._reserving = reserving
        self._reserving.add_done_callback(lambda result: self._inbox.put_nowait(_Reserved(result)))

    async def _land(self, reservation: Reservation | bool) -> None:
        if isinstance(reservation, bool):
            await self._give_up(Status.CANCELLED, "no pages are set aside for it")
            return
        transport = self._node.transport
        self._reservation = reservation
        self.state = State.LANDED
        self._landing = transport.expect(reservation.id, reservation.generation, reservation.pages)
        self._arrivals = Arrivals(reservation, self._node.memory, checksums=self._node.settings.kv_checksum)
        self._watchers.append(asyncio.create_task(self._watch(self._landing)))
        self._send(
            pb.FillRequest(
                landing=pb.FillLanding(
                    reservation=reservation.id,
                    generation=reservation.generation,
                    epoch=transport.epoch,
                    first_block=reservation.first_block,
                    pages=reservation.pages,
                )
            )
        )

    async def _take_first(self, message: pb.FillFirstTokens) -> None:
        try:
            self._first = first_outputs_from_wire(message, self._request, self._node.limits)
        except InvalidRequestError as error:
            await self._fail(Failure.PROTOCOL, str(error))
            return
        # What both have in their caches was saved only once.
        cached_tokens = min(max(self._cached_tokens, message.cached_tokens), self._request.prompt_len)
        self._on_first(
            self._first,
            pb.Prefilled(
                cached_tokens=cached_tokens, prefill_worker=self._candidate.worker_id, queue_ms=message.queue_ms
            ),
        )
        if all(output.finish is not None for output in self._first):
            await self._give_up(Status.FINISHED, "")

    async def _take_pages(self, message: pb.FillPages) -> None:
        assert self._arrivals is not None
        try:
            self._arrivals.told(message)
        except InvalidRequestError as error:
            await self._fail(Failure.PROTOCOL, str(error))

    async def _take_released(self, message: pb.FillReleased) -> None:
        """Nothing comes any more. What was sent may still be on its way through this process."""
        expected = len(self._reservation.pages) if self._reservation else -1
        if message.error or message.pages != expected:
            reason = message.error or f"it sent {message.pages} of {expected} pages"
            await self._fail(Failure.TRANSFER, reason)
        elif not self._answered or not (self._arrivals and self._arrivals.all_told):
            await self._fail(Failure.PROTOCOL, "it did not send its first tokens, or not say which pages it sent")

    async def _use(self) -> None:
        """Everything that was promised has come: if it is right, the engine gets it."""
        assert self._arrivals is not None
        if not self._arrivals.all_told:
            return
        if damaged := await self._arrivals.damaged_blocks():
            log.error("pages from %s arrived damaged: blocks %s", self._candidate.worker_id, damaged)
            await self._fail(Failure.DAMAGED, f"{len(damaged)} pages arrived damaged")
            return
        await self._activate()

    async def _activate(self) -> None:
        """An abort that comes after the look at the open choices reaches the engine after this: no await between."""
        reservation, request = self._reservation, self._request
        assert reservation is not None
        wanted = [output for output in self._first if output.choice in self._open_choices()]
        if not wanted:
            await self._give_up(Status.CANCELLED, "cancelled")
            return
        ended = await self._node.engine.call(lambda engine: engine.activate(reservation, request, wanted))
        self._reservation = None
        self._decide(Outcome(Status.COMPLETE, first=self._first, ended=ended))

    async def _fail(self, failure: Failure, reason: str) -> None:
        await self._give_up(Status.FAILED, reason, failure)

    async def _give_up(self, status: Status, reason: str, failure: Failure | None = None) -> None:
        if self._reserving is not None:
            self._reservation = await self._withdraw()
        safe = self._landing is None or self._landing.revoke()
        reservation = self._reservation
        if reservation is not None:
            self._node.engine.post(lambda engine: engine.cancel(reservation, quarantine=not safe))
            if safe:
                self._reservation = None
        self._decide(Outcome(status, reason, failure, self._first))

    async def _withdraw(self) -> Reservation | None:
        assert self._reserving is not None
        assert self._wanted is not None
        self._wanted.withdrawn = True
        self._node.engine.nudge()
        try:
            result = await self._reserving
        except ValueError:
            return None
        return result if isinstance(result, Reservation) else None

    def _decide(self, outcome: Outcome) -> None:
        self.state = State.DECIDED
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # ---- afterwards ----

    async def _settle(self, reservation: Reservation) -> None:
        """The pages are in quarantine."""
        assert self._landing is not None
        log.warning(
            "%d pages are in quarantine until %s has let go of them", len(reservation.pages), self._candidate.worker_id
        )
        self._send(pb.FillRequest(cancel=pb.FillCancel()))
        self._watchers.append(asyncio.create_task(self._watch_peer(self._landing)))
        while True:
            event = await self._inbox.get()
            if event is _Signal.PEER_GONE:
                break
            ended = isinstance(event, pb.FillEvent) and event.WhichOneof("kind") in ("released", "refused")
            if ended and self._landing.revoke():
                break
        await self._node.engine.call(lambda engine: engine.end_quarantine(reservation))

    async def _until_released(self) -> None:
        """Lets the prefill worker end in order: it takes the end of the stream for a cancel, and the next fill can have
        the stream."""
        self._moved()
        while not self._released:
            event = await self._next()
            if isinstance(event, pb.FillEvent):
                self._heard()
                self._released = event.WhichOneof("kind") == "released"
            elif isinstance(event, StreamEnded) or event in (_Signal.SILENCE, _Signal.STALL):
                return

    # ---- small parts ----

    async def _watch(self, landing: Landing) -> None:
        try:
            await landing.done()
        except TransferError as error:
            self._inbox.put_nowait(_PagesArrived(error))
        else:
            self._inbox.put_nowait(_PagesArrived(None))

    async def _watch_peer(self, landing: Landing) -> None:
        await landing.peer_gone()
        self._inbox.put_nowait(_Signal.PEER_GONE)

    def _start(self) -> pb.FillStart:
        request = self._request
        return pb.FillStart(
            decode_worker_id=self._node.worker_id,
            fingerprint=self._node.fingerprint,
            tokens=pack_tokens(request.token_ids),
            prompt_len=request.prompt_len,
            hash_root=request.hash_root,
            block_hashes=b"".join(request.block_hashes),
            sampling=sampling_to_wire(request.params),
            n=request.n,
            choice=request.first_choice,
            transport=self._node.transport.name,
            transport_address=self._node.transport.address,
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=deadline_ms_to_wire(request, time.monotonic()),
            request=request.number,
            checksums=self._node.settings.kv_checksum,
        )

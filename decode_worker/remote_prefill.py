"""One attempt to have a prompt prefilled by one other worker, as the decode worker sees it.

States, and what is held in each:

    CONNECTING   called; no message came yet                                nothing
    QUEUED       waits in the prefill worker's queue                        nothing
    RESERVING    the prefill worker computes; pages for its landing are     a landing request, from when its blocks in
                 being reserved (`landing_queue.py`)                        host memory are loaded
    LANDED       the prefill worker knows the landing, sends pages and      the reservation, the landing
                 announces them
    DECIDED      `outcome` is known

First tokens come in RESERVING or LANDED and go to the router at once. The outcome decides about the reservation:

    COMPLETE     all pages are here and verified                            goes to the engine
    FINISHED     the first tokens were the last ones                        cancelled
    FAILED       refused, broken or silent for too long                     cancelled
    INTERRUPTED  this worker's model goes to sleep                          cancelled
    CANCELLED    the result is no longer wanted                             cancelled

A cancelled reservation's pages are free at once if the landing could be revoked, which proves that nothing writes into
them. Otherwise they are quarantined, and the attempt goes on in the background until the prefill worker says that
nothing is in flight, or the transport proves it. The task that runs an attempt is never cancelled before that.

Two time limits apply until the outcome is known. A running prefill worker sends something every second: one that is
silent for SILENT_S has stopped or is cut off. One that makes no progress for `prefill_progress_s` hangs.
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
from decode_worker.landing_queue import LandingQueue, LandingRequest, Reserved
from decode_worker.page_verifier import PageVerifier
from decode_worker.prefill_outcome import Failure, Outcome, Status
from engine.types import Output, Request, Reservation
from kvtransfer.base import Landing
from worker.async_engine import EngineDiedError
from worker.context import WorkerContext
from worker.prefill_client import StreamEnded
from worker.wire_format import InvalidRequestError, deadline_ms_to_wire, first_outputs_from_wire, sampling_to_wire

log = logging.getLogger(__name__)

SILENT_S = 3.0
"""A prefill worker without a message for this long, three heartbeats, is given up."""


class RemotePrefillState(Enum):
    """See the module's table."""

    CONNECTING = auto()
    QUEUED = auto()
    RESERVING = auto()
    LANDED = auto()
    DECIDED = auto()


@dataclass(frozen=True, slots=True)
class _ReserveEnded:
    result: "asyncio.Future[Reserved]"


@dataclass(frozen=True, slots=True)
class _PagesArrived:
    error: TransferError | None


class _Signal(Enum):
    CANCEL = auto()
    INTERRUPT = auto()
    SILENCE = auto()
    STALL = auto()
    PEER_GONE = auto()


_Event = pb.PrefillEvent | StreamEnded | _ReserveEnded | _PagesArrived | _Signal


class RemotePrefill:
    """See the module's tables.

    Args:
        request: The prompt.
        candidate: The prefill worker.
        cached_tokens: Tokens of the prompt that this worker has cached.
        on_first: Called once, with the first tokens and how they were computed.
        on_landed: Called once, when all pages are here, if any were missing.
        traceparent: Names the span of the call; empty if the request is not traced.
        open_choices: Returns the choices that the router still wants.

    Attributes:
        outcome: Set when it is known.
    """

    def __init__(
        self,
        request: Request,
        candidate: pb.PrefillCandidate | pb.PrefixSource,
        *,
        cached_tokens: int,
        context: WorkerContext,
        landings: LandingQueue,
        on_first: Callable[[Sequence[Output], pb.Prefilled], None],
        on_landed: Callable[[pb.Landed], None],
        traceparent: str,
        open_choices: Callable[[], Collection[int]],
    ) -> None:
        self.state = RemotePrefillState.CONNECTING
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._request = request
        self._candidate = candidate
        self._cached_tokens = cached_tokens
        self._context = context
        self._landings = landings
        self._on_first = on_first
        self._on_landed = on_landed
        self._traceparent = traceparent
        self._open_choices = open_choices
        self._waits_since = asyncio.get_running_loop().time()  # for the pages
        self._cancelled = False
        self._inbox: asyncio.Queue[_Event] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self._message_by = 0.0  # loop times
        self._progress_by = 0.0
        self._landing_request: LandingRequest | None = None
        self._reservation: Reservation | None = None
        self._landing: Landing | None = None
        self._verifier: PageVerifier | None = None
        self._first: list[Output] = []
        self._arrived = False
        self._released = False

    def cancel(self) -> None:
        """Gives up the result. Idempotent."""
        if not self._cancelled:
            self._cancelled = True
            self._inbox.put_nowait(_Signal.CANCEL)

    def interrupt(self) -> None:
        """Ends it, because the pool loses its memory. Pages that have all arrived may still be used."""
        self._inbox.put_nowait(_Signal.INTERRUPT)

    async def run(self) -> None:
        """Runs to the outcome, and on until nothing can write into the pages."""
        name = f"prefill of {self._request.id} by {self._candidate.worker_id}"
        try:
            with self._context.prefill_client.request(
                self._candidate.worker_id, self._candidate.address, self._inbox.put_nowait
            ) as self._send:
                try:
                    await self._until_decided()
                except EngineDiedError:
                    raise
                except Exception as error:
                    log.exception("%s failed unexpectedly", name)
                    await self._fail(Failure.INTERNAL, repr(error))
                if self._reservation is not None:
                    await self._until_unwritten(self._reservation)
                elif self.outcome.result().status is Status.COMPLETE:
                    await self._until_released()
        except EngineDiedError as error:
            self._decide(Outcome(Status.FAILED, str(error), Failure.INTERNAL, self._first))
        except Exception as error:
            log.exception("%s could not be ended in order", name)
            self._decide(Outcome(Status.FAILED, repr(error), Failure.INTERNAL, self._first))
        finally:
            for watcher in self._watchers:
                watcher.cancel()

    # ---- until the outcome is known ----

    async def _until_decided(self) -> None:
        self._send(pb.PrefillRequest(start=self._start()))
        self._progressed()
        while not self.outcome.done():
            event = await self._next()
            match event:
                case pb.PrefillEvent():
                    await self._take(event)
                case _ReserveEnded(result):
                    self._landing_request = None
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
                    connecting = self.state is RemotePrefillState.CONNECTING
                    await self._fail(Failure.UNREACHABLE if connecting else Failure.LOST, reason)
                case _Signal.SILENCE:
                    await self._fail(Failure.SILENT, f"no message for {SILENT_S:g} s ({self.state.name})")
                case _Signal.STALL:
                    await self._fail(Failure.STALLED, f"no progress for {self._stall_s:g} s ({self.state.name})")
                case _Signal.CANCEL:
                    await self._give_up(Status.CANCELLED, "cancelled")
                case _Signal.INTERRUPT:
                    await self._give_up(Status.INTERRUPTED, "this worker's model goes to sleep")
            if self._answered and self._arrived and not self.outcome.done():
                await self._use()

    async def _next(self) -> _Event:
        clock = asyncio.get_running_loop().time
        while True:
            deadline = min(self._message_by, self._progress_by)
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._inbox.get()
            except TimeoutError:
                if clock() - deadline > SILENT_S / 2:  # this process itself was stopped
                    self._progressed()
                    continue
                return _Signal.SILENCE if deadline == self._message_by else _Signal.STALL

    @property
    def _stall_s(self) -> float:
        """Longest time without progress. After Released, all that was sent must arrive soon."""
        stall_s = self._context.settings.prefill_progress_s
        return min(stall_s, SILENT_S) if self._released else stall_s

    def _heard(self) -> None:
        """Records that the prefill worker's process runs. After Released it may stay silent."""
        self._message_by = math.inf if self._released else asyncio.get_running_loop().time() + SILENT_S

    def _progressed(self) -> None:
        """Records that the prefill worker makes progress."""
        self._progress_by = asyncio.get_running_loop().time() + self._stall_s
        self._heard()

    async def _take(self, event: pb.PrefillEvent) -> None:
        kind = event.WhichOneof("kind")
        if self.state is RemotePrefillState.CONNECTING:
            self.state = RemotePrefillState.QUEUED
        if kind == "alive":
            self._heard()
            return
        self._progressed()
        match kind, self.state:
            case "progress", _:
                pass
            case "ready", RemotePrefillState.QUEUED:
                await self._reserve(event.ready)
            case "first_tokens", RemotePrefillState.RESERVING | RemotePrefillState.LANDED if not self._answered:
                await self._take_first(event.first_tokens)
            case "pages", RemotePrefillState.LANDED:
                await self._take_pages(event.pages)
            case "released", _:
                self._released = True
                self._progressed()
                await self._take_released(event.released)
            case "refused", _:
                self._released = True
                full = event.refused.queue_full
                await self._fail(Failure.QUEUE_FULL if full else Failure.REFUSED, event.refused.message)
            case _:
                await self._fail(Failure.PROTOCOL, f"it sent {kind} in state {self.state.name}")

    @property
    def _answered(self) -> bool:
        """True if everything but the pages has come."""
        return bool(self._first)

    async def _reserve(self, ready: pb.PrefillReady) -> None:
        self._await_pages(self._landings.reserve(self._request))

    def _await_pages(self, landing_request: LandingRequest) -> None:
        self.state = RemotePrefillState.RESERVING
        self._landing_request = landing_request
        landing_request.reserved.add_done_callback(lambda result: self._inbox.put_nowait(_ReserveEnded(result)))

    async def _land(self, reservation: Reserved) -> None:
        if isinstance(reservation, bool):
            await self._give_up(Status.CANCELLED, "no pages are reserved for it")
            return
        transport = self._context.transport
        self._reservation = reservation
        self.state = RemotePrefillState.LANDED
        self._landing = transport.expect(reservation.id, reservation.generation, reservation.pages)
        checksums = self._context.settings.kv_checksum
        self._verifier = PageVerifier(reservation, self._context.memory, checksums=checksums)
        self._watchers.append(asyncio.create_task(self._watch(self._landing)))
        self._send(
            pb.PrefillRequest(
                landing=pb.PrefillLanding(
                    reservation=reservation.id,
                    generation=reservation.generation,
                    epoch=transport.epoch,
                    first_block=reservation.first_block,
                    pages=reservation.pages,
                )
            )
        )

    async def _take_first(self, message: pb.PrefillFirstTokens) -> None:
        try:
            self._first = first_outputs_from_wire(message, self._request, self._context.limits)
        except InvalidRequestError as error:
            await self._fail(Failure.PROTOCOL, str(error))
            return
        # Tokens that both workers have cached count once.
        cached_tokens = min(max(self._cached_tokens, message.cached_tokens), self._request.prompt_len)
        self._waits_since = asyncio.get_running_loop().time()
        self._on_first(
            self._first,
            pb.Prefilled(
                cached_tokens=cached_tokens, prefill_worker=self._candidate.worker_id, queue_ms=message.queue_ms
            ),
        )
        if all(output.finish is not None for output in self._first):
            await self._give_up(Status.FINISHED, "")

    async def _take_pages(self, message: pb.PrefillPages) -> None:
        assert self._verifier is not None
        try:
            self._verifier.announce(message)
        except InvalidRequestError as error:
            await self._fail(Failure.PROTOCOL, str(error))

    async def _take_released(self, message: pb.PrefillReleased) -> None:
        """Checks that everything was sent. The pages may still be on their way through this process."""
        expected = len(self._reservation.pages) if self._reservation else -1
        if message.error or message.pages != expected:
            reason = message.error or f"it sent {message.pages} of {expected} pages"
            await self._fail(Failure.TRANSFER, reason)
        elif not self._answered or not (self._verifier and self._verifier.complete):
            await self._fail(Failure.PROTOCOL, "it did not send its first tokens, or did not announce all pages")

    async def _use(self) -> None:
        """Hands the pages to the engine once all of them are announced, if they are intact."""
        assert self._verifier is not None
        if not self._verifier.complete:
            return
        if damaged := await self._verifier.damaged_blocks():
            log.error("pages from %s arrived damaged: blocks %s", self._candidate.worker_id, damaged)
            await self._fail(Failure.DAMAGED, f"{len(damaged)} pages arrived damaged")
            return
        await self._activate()

    async def _activate(self) -> None:
        """Continues the open choices. There is no await after reading them, so a later abort finds the request."""
        reservation, request = self._reservation, self._request
        assert reservation is not None
        wanted = [output for output in self._first if output.choice in self._open_choices()]
        if not wanted:
            await self._give_up(Status.CANCELLED, "cancelled")
            return
        self._tell_landed(reservation)
        ended = await self._context.engine.call(lambda engine: engine.landings.activate(reservation, request, wanted))
        self._reservation = None
        self._decide(Outcome(Status.COMPLETE, first=self._first, ended=ended))

    def _tell_landed(self, reservation: Reservation) -> None:
        if reservation.pages:
            waited_s = asyncio.get_running_loop().time() - self._waits_since
            self._on_landed(pb.Landed(pages=len(reservation.pages), waited_ms=waited_s * 1e3))

    async def _fail(self, failure: Failure, reason: str) -> None:
        await self._give_up(Status.FAILED, reason, failure)

    async def _give_up(self, status: Status, reason: str, failure: Failure | None = None) -> None:
        if self._landing_request is not None:
            self._reservation = await self._landing_request.withdraw()
        safe = self._landing is None or self._landing.revoke()
        reservation = self._reservation
        if reservation is not None:
            self._context.engine.post(lambda engine: engine.landings.cancel(reservation, quarantine=not safe))
            if safe:
                self._reservation = None
        self._decide(Outcome(status, reason, failure, self._first))

    def _decide(self, outcome: Outcome) -> None:
        self.state = RemotePrefillState.DECIDED
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # ---- afterwards ----

    async def _until_unwritten(self, reservation: Reservation) -> None:
        """Waits until nothing can write into the quarantined pages, and frees them."""
        assert self._landing is not None
        log.debug("%d pages stay quarantined until %s releases them", len(reservation.pages), self._candidate.worker_id)
        self._send(pb.PrefillRequest(cancel=pb.PrefillCancel()))
        self._watchers.append(asyncio.create_task(self._watch_peer(self._landing)))
        while True:
            event = await self._inbox.get()
            if event is _Signal.PEER_GONE:
                break
            ended = isinstance(event, pb.PrefillEvent) and event.WhichOneof("kind") in ("released", "refused")
            if ended and self._landing.revoke():
                break
        await self._context.engine.call(lambda engine: engine.landings.end_quarantine(reservation))

    async def _until_released(self) -> None:
        """Waits for Released, because closing the stream earlier would cancel the request and waste the stream."""
        self._progressed()
        while not self._released:
            event = await self._next()
            if isinstance(event, pb.PrefillEvent):
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

    def _start(self) -> pb.PrefillStart:
        request, context = self._request, self._context
        return pb.PrefillStart(
            decode_worker_id=context.worker_id,
            fingerprint=context.fingerprint,
            tokens=pack_tokens(request.token_ids),
            prompt_len=request.prompt_len,
            hash_root=request.hash_root,
            block_hashes=b"".join(request.block_hashes),
            sampling=sampling_to_wire(request.params),
            n=request.n,
            choice=request.first_choice,
            transport=context.transport.name,
            transport_address=context.transport.address,
            common_address=context.transport.common_address,
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=deadline_ms_to_wire(request, time.monotonic()),
            request=request.number,
            checksums=context.settings.kv_checksum,
            traceparent=self._traceparent,
        )

"""Where a request with prefill candidates is prefilled: here, or by one of them. And what comes before that.

    ┌─▶ look: little is uncached ──▶ the engine takes it (local)
    │         somebody fills the same prefix ──▶ wait for that, look again
    │         much is uncached ──▶ the next candidate fills it ──▶ the engine goes on with it (remote)
    │                                    │ failed                     no candidate left ──▶ Reroute
    └────────────────────────────────────┘

A request with no candidates whose first blocks are cached elsewhere is computed here. If much of it is uncached here,
that cache fills them first: one try, of no more than `fill_progress_s`, after which what is still lacking is computed.

First tokens that a failed fill brought are facts: the request goes on as prompt plus first token, one request a choice.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from cpd.common.blocks import BLOCK_SIZE, extend_hashes
from cpd.common.errors import QueueFullError
from cpd.rpc import cpd_pb2 as pb
from decode_worker.landing_queue import ReservationQueue
from decode_worker.live import LiveRequest
from decode_worker.outcome import Outcome, Status
from decode_worker.prefix_fetch import PrefixFill
from decode_worker.remote_prefill import Fill
from engine.engine import Engine
from engine.types import Output, Request
from worker.engine_bridge import EngineDiedError
from worker.node import Node

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a look at the cache came to."""

    TAKEN = auto()  # the engine has the request
    TOO_LONG = auto()  # too much is uncached
    UNWANTED = auto()  # the request has ended


@dataclass(frozen=True, slots=True)
class Look:
    """What the cache has, and what follows from it.

    Attributes:
        missing: The first full block that the cache lacks; empty: there is none.
        cached_tokens: What comes before it.
    """

    verdict: Verdict
    missing: bytes = b""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Routes:
    """What all routes of a worker share.

    Attributes:
        filling: Fills under way, by the first block they bring; resolved when they are over.
        known_as: Tells the service under which further name the engine may report on a request.
        start: Runs a fill in the background, beyond the life of its request.
        outcomes: Counts fills and what became of requests whose fills failed.
        failures: Counts failed fills by reason.
    """

    node: Node
    reservations: ReservationQueue
    filling: dict[bytes, asyncio.Future[None]]
    known_as: Callable[[str, LiveRequest], None]
    start: Callable[[Fill], None]
    outcomes: Counter[str]
    failures: Counter[str]


class Route:
    """The way of one request to its first tokens.

    Args:
        live: The request.
        message: What the router says of who may help.
    """

    def __init__(self, live: LiveRequest, message: pb.Submit, routes: Routes) -> None:
        self._live = live
        self._candidates = list(message.prefill_candidates)
        self._prefix_source = message.prefix_source if message.HasField("prefix_source") else None
        self._long_prefill_tokens = message.long_prefill_tokens  # more uncached tokens are not prefilled here
        self._routes = routes
        self._requests = [live.request]
        self._failures: dict[str, str] = {}  # why, by prefill worker

    async def run(self) -> None:
        """Returns when the engine has the request, or it has ended."""
        try:
            await self._run()
        except QueueFullError as error:
            self._live.refuse_queue_full(error)
        except EngineDiedError as error:
            self._live.refuse(pb.Refusal.KIND_REROUTE, str(error))
        except ValueError as error:
            self._live.refuse(pb.Refusal.KIND_FAILED, str(error))
        except Exception:
            log.exception("request %s failed unexpectedly", self._live.trace_id)
            self._live.refuse(pb.Refusal.KIND_FAILED, "the worker failed to place the request")

    async def _run(self) -> None:
        if self._prefix_source is not None and not self._candidates:
            look = await self._look()
            if look.verdict is not Verdict.TOO_LONG:
                return
            await self._fill_prefix(self._requests[0], self._prefix_source, look)
            self._long_prefill_tokens = len(self._live.request.token_ids)
        for candidate in self._candidates:
            look = await self._look()
            if look.verdict is not Verdict.TOO_LONG:
                return
            if len(self._requests) > 1:
                break  # choices that go on each by itself share their prompt through the cache, not through fills
            outcome = await self._fill(self._requests[0], candidate, look)
            if outcome.status is not Status.FAILED:
                return
            log.warning("prefill of %s by %s failed: %s", self._live.trace_id, candidate.worker_id, outcome.reason)
            self._failures[candidate.worker_id] = outcome.reason
            self._go_on_after(outcome.first)
        if (await self._look()).verdict is Verdict.TOO_LONG:
            self._routes.outcomes["rerouted"] += 1
            reasons = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in self._failures.items())
            self._live.refuse(
                pb.Refusal.KIND_REROUTE, f"prefill failed: {reasons}", failed_prefill_workers=self._failures
            )

    # ---- here ----

    async def _look(self) -> Look:
        """Waits for whoever fills this prefix already. The engine has the request if that was the thing to do."""
        while True:
            look = await self._routes.node.engine.poll(self._take_or_wait)
            filler = self._routes.filling.get(look.missing)
            if look.verdict is not Verdict.TOO_LONG or filler is None:
                if look.verdict is Verdict.TAKEN and self._failures:
                    self._routes.outcomes["local_fallback"] += 1
                return look
            await asyncio.wait([filler, self._live.ended], return_when=asyncio.FIRST_COMPLETED)

    def _take_or_wait(self, engine: Engine) -> Look | None:
        """On the engine thread. None while the engine itself computes what this request needs next."""
        if self._live.ended.done() or not self._requests:
            return Look(Verdict.UNWANTED)
        request = self._requests[0]
        uncached = engine.uncached_tokens(request)
        if uncached > self._long_prefill_tokens:
            if engine.pending(request):
                return None
            cached_tokens = len(request.token_ids) - uncached
            first = cached_tokens // BLOCK_SIZE
            return Look(Verdict.TOO_LONG, b"".join(request.block_hashes[first : first + 1]), cached_tokens)
        add_all(engine, self._requests, self._live.closed)
        return Look(Verdict.TAKEN)

    # ---- there ----

    async def _fill_prefix(self, request: Request, prefix_source: pb.PrefixSource, look: Look) -> None:
        if look.cached_tokens >= prefix_source.blocks * BLOCK_SIZE:
            return
        fill = self._make(PrefixFill, request, prefix_source, look)
        outcome = await self._outcome(fill, look, timeout_s=self._routes.node.settings.fill_progress_s)
        self._routes.outcomes[f"prefix_{_COUNTED_AS[outcome.status]}"] += 1
        if outcome.status is Status.COMPLETE:
            self._live.prefix_worker = prefix_source.worker_id
        elif not self._live.ended.done():
            log.warning("no prefix of %s from %s: %s", self._live.trace_id, prefix_source.worker_id, outcome.reason)

    async def _fill(self, request: Request, candidate: pb.PrefillCandidate, look: Look) -> Outcome:
        outcome = await self._outcome(self._make(Fill, request, candidate, look), look)
        self._routes.outcomes[_COUNTED_AS[outcome.status]] += 1
        self._live.send(outcome.ended)
        return outcome

    def _make(
        self, kind: type[Fill], request: Request, candidate: pb.PrefillCandidate | pb.PrefixSource, look: Look
    ) -> Fill:
        live, routes = self._live, self._routes
        return kind(
            request,
            candidate,
            cached_tokens=look.cached_tokens,
            node=routes.node,
            reservations=routes.reservations,
            on_first=live.send,
            open_choices=lambda: live.open,
        )

    async def _outcome(self, fill: Fill, look: Look, timeout_s: float | None = None) -> Outcome:
        """Runs a fill; it is given up when nobody waits for the request any more, or after `timeout_s`."""
        live, routes, missing = self._live, self._routes, look.missing
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if missing:
            routes.filling[missing] = over
        routes.start(fill)
        ends: list[asyncio.Future[Any]] = [fill.outcome, live.ended]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not fill.outcome.done():
            fill.cancel()
        outcome = await fill.outcome
        if missing:
            del routes.filling[missing]
        over.set_result(None)
        if outcome.failure is not None:
            routes.failures[outcome.failure.value] += 1
        return outcome

    def _go_on_after(self, first: Sequence[Output]) -> None:
        if not first:
            return
        (request,) = self._requests
        self._requests = [
            continuation(request, output)
            for output in first
            if output.finish is None and output.choice in self._live.open
        ]
        for request in self._requests:
            self._live.engine_ids.append(request.id)
            self._routes.known_as(request.id, self._live)


_COUNTED_AS = {
    Status.COMPLETE: "completed",
    Status.FINISHED: "completed",
    Status.FAILED: "failed",
    Status.CANCELLED: "cancelled",
}


def add_all(engine: Engine, requests: Sequence[Request], closed: Collection[int]) -> None:
    """Adds all of `requests` to the engine, or none; without the choices that were aborted before it knew of them.

    Raises:
        QueueFullError: The engine's queue has no room.
        ValueError: A request can never be served here.
    """
    try:
        for request in requests:
            engine.add(request)
    except (QueueFullError, ValueError):
        for request in requests:
            engine.abort(request.id)
        raise
    if closed:
        for request in requests:
            engine.abort(request.id, list(closed))


def continuation(request: Request, output: Output) -> Request:
    """What is left of one choice of `request` after its first token was emitted."""
    token_ids = [*request.token_ids, *output.token_ids]
    hashed = len(request.block_hashes)
    parent = request.block_hashes[-1] if hashed else request.hash_root
    return replace(
        request,
        id=f"{request.id}.{output.choice}",
        token_ids=token_ids,
        block_hashes=request.block_hashes + extend_hashes(parent, token_ids[hashed * BLOCK_SIZE :]),
        first_choice=output.choice,
        n=1,
    )

"""Decides where a request's prompt is prefilled, if other workers may help: here, or by a prefill worker.

    ┌─▶ look at the cache: little is uncached ──▶ the engine takes the request (local)
    │         the missing prefix is already being computed or received ──▶ wait for it, look again
    │         much is uncached ──▶ the next candidate prefills it ──▶ the engine continues it (remote)
    │                                    │ failed                     no candidate left ──▶ Reroute
    └────────────────────────────────────┘

A request without candidates, but with a prefix source, is computed here. If much of it is uncached here, its prefix is
fetched first: one attempt of at most `prefill_progress_s`. The engine computes the rest.

First tokens of a failed remote prefill were sent to the client and can't be sampled again: the request continues as
prompt plus first token, one request per choice.

While this worker's model drains or sleeps, the engine takes every request: it waits there for the next wake. Remote
prefills and prefix fetches under way are interrupted when the model goes to sleep.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from cpd.common.blocks import BLOCK_SIZE, blocks_for, extend_hashes
from cpd.common.errors import QueueFullError
from cpd.rpc import cpd_pb2 as pb
from decode_worker.landing_queue import LandingQueue
from decode_worker.prefill_outcome import Failure, Outcome, Status
from decode_worker.prefix_fetch import PrefixFetch
from decode_worker.remote_prefill import RemotePrefill
from decode_worker.router_request import RouterRequest
from engine.engine import Engine
from engine.types import Output, Request
from worker.async_engine import EngineDiedError
from worker.context import WorkerContext

log = logging.getLogger(__name__)


class PrefillCoordinator:
    """Coordinates the prefills of a worker's requests.

    Args:
        on_engine_id: Called with each additional engine request id of a request.
        computes_for_others: True while this worker computes prompts for others. Then no prompt is prefilled remotely
            (`worker/service.py` has the reason).

    Attributes:
        remote_prefills: Counts remote prefills by outcome, and what became of requests after failures.
        prefix_fetches: Counts prefix fetches by outcome.
        failures: Counts failed remote prefills and prefix fetches by reason.
        running: Remote prefills and prefix fetches that have not ended. They may outlive their request.
    """

    def __init__(
        self,
        context: WorkerContext,
        on_engine_id: Callable[[str, RouterRequest], object],
        computes_for_others: Callable[[], bool],
    ) -> None:
        self.remote_prefills: Counter[str] = Counter()
        self.prefix_fetches: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.running: dict[RemotePrefill, asyncio.Task[None]] = {}
        self._context = context
        self._on_engine_id = on_engine_id
        self._computes_for_others = computes_for_others
        self._landings = LandingQueue(context.engine)
        # By first missing block: futures, done when that remote prefill ends.
        self._arriving: dict[bytes, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Number of requests that the engine does not have yet."""
        return len(self._tasks)

    @property
    def waits_for_pages(self) -> bool:
        """True while a request may wait for pages that another worker computes."""
        return any(not isinstance(prefill, PrefixFetch) for prefill in self.running)  # a fetch never waits for pages

    def start(self, request: RouterRequest, message: pb.Submit) -> None:
        """Starts the prefill of a request."""
        coordination = _Coordination(self, request, message)
        task = asyncio.create_task(coordination.run(), name=f"coordinate-{request.request.id}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def interrupt(self) -> None:
        """Ends remote prefills and prefix fetches, because the model goes to sleep."""
        for prefill in self.running:
            prefill.interrupt()

    async def stop(self) -> None:
        """Returns when every request has ended. Call it after they were refused."""
        await asyncio.gather(*self._tasks)
        for task in self.running.values():
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._context.load_changed()


class _Verdict(Enum):
    TAKEN = auto()  # the engine has the request
    TOO_LONG = auto()  # too much is uncached
    UNWANTED = auto()  # the request has ended


@dataclass(frozen=True, slots=True)
class _CacheReport:
    """What the cache has of a request, and what was done.

    Attributes:
        missing: The first full block that the cache lacks; empty if it lacks none.
        cached_tokens: Tokens before it.
    """

    verdict: _Verdict
    missing: bytes = b""
    cached_tokens: int = 0


class _Coordination:
    """The way of one request to its first tokens."""

    def __init__(self, coordinator: PrefillCoordinator, request: RouterRequest, message: pb.Submit) -> None:
        self._coordinator = coordinator
        self._engine = coordinator._context.engine
        self._request = request
        self._candidates = list(message.prefill_candidates)
        self._prefix_source = message.prefix_source if message.HasField("prefix_source") else None
        self._long_prefill_tokens = message.long_prefill_tokens  # more uncached tokens are not prefilled here
        self._parts = [request.request]  # one; after first tokens one per choice
        self._awaited: bytes | None = None  # the block that the request waits for, being computed or received
        self._failures: dict[str, str] = {}  # reason, by prefill worker
        self._resumed = False  # it had first tokens when the model went to sleep

    async def run(self) -> None:
        """Returns when the engine has the request, or it has ended."""
        try:
            await self._run()
        except (QueueFullError, EngineDiedError, ValueError) as error:
            self._request.refuse_for(error)
        except Exception:
            log.exception("the request failed unexpectedly", extra=self._request.log_fields)
            self._request.refuse(pb.Refusal.KIND_FAILED, "the worker failed to place the request")

    async def _run(self) -> None:
        if self._prefix_source is not None and not self._candidates:
            report = await self._take_or_report()
            if report.verdict is not _Verdict.TOO_LONG:
                return
            await self._fetch_prefix(self._prefix_source, report)
            self._compute_here()
        for candidate in self._candidates:
            report = await self._take_or_report()
            if report.verdict is not _Verdict.TOO_LONG:
                return
            if len(self._parts) > 1:
                break  # a remote prefill takes one request; these are one per choice, and share the prompt in the cache
            if self._coordinator._computes_for_others():
                self._compute_here()
                break
            outcome = await self._prefill_by(candidate, report)
            if outcome.status is Status.INTERRUPTED:
                self._continue_after(outcome.first)
                self._resumed = bool(outcome.first)
                self._compute_here()
                break
            if outcome.status is not Status.FAILED:
                return
            level = logging.DEBUG if outcome.failure is Failure.QUEUE_FULL else logging.INFO
            about = self._request.log_fields
            log.log(level, "the prefill by %s failed: %s", candidate.worker_id, outcome.reason, extra=about)
            self._failures[candidate.worker_id] = outcome.reason
            self._continue_after(outcome.first)
        if (await self._take_or_report()).verdict is _Verdict.TOO_LONG:
            self._coordinator.remote_prefills["rerouted"] += 1
            reasons = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in self._failures.items())
            self._request.refuse(
                pb.Refusal.KIND_REROUTE, f"prefill failed: {reasons}", failed_prefill_workers=self._failures
            )

    # ---- local ----

    def _compute_here(self) -> None:
        """From here on everything is local."""
        self._long_prefill_tokens = len(self._request.request.token_ids) + 1

    async def _take_or_report(self) -> _CacheReport:
        """Waits while the missing prefix is on its way; gives the request to the engine if little is missing."""
        while True:
            report = await self._engine.poll(self._take_or_wait)
            arriving = self._coordinator._arriving.get(report.missing)
            if report.verdict is not _Verdict.TOO_LONG or arriving is None:
                if report.verdict is _Verdict.TAKEN and self._failures:
                    self._coordinator.remote_prefills["local_fallback"] += 1
                return report
            await asyncio.wait([arriving, self._request.ended], return_when=asyncio.FIRST_COMPLETED)

    def _take_or_wait(self, engine: Engine) -> _CacheReport | None:
        """Runs on the engine thread. Returns None while blocks that decide the answer are computed or received."""
        if self._request.ended.done() or not self._parts:
            return _CacheReport(_Verdict.UNWANTED)
        if self._awaited is not None and engine.is_pending(self._awaited):
            return None  # without a lookup of the whole prefix
        request = self._parts[0]
        uncached = engine.uncached_tokens(request)
        if uncached > self._long_prefill_tokens and engine.starts_new:
            # With these blocks at most `_long_prefill_tokens` stay uncached: it need not wait for later ones.
            blocks = blocks_for(len(request.token_ids) - self._long_prefill_tokens)
            self._awaited = engine.block_to_wait_for(request, blocks)
            if self._awaited is not None:
                return None
            cached_tokens = len(request.token_ids) - uncached
            first = cached_tokens // BLOCK_SIZE
            return _CacheReport(_Verdict.TOO_LONG, b"".join(request.block_hashes[first : first + 1]), cached_tokens)
        _add_all(engine, self._parts, self._request.closed, resumed=self._resumed)
        return _CacheReport(_Verdict.TAKEN)

    # ---- remote ----

    async def _fetch_prefix(self, source: pb.PrefixSource, report: _CacheReport) -> None:
        if report.cached_tokens >= source.blocks * BLOCK_SIZE:
            return
        fetch = self._make(PrefixFetch, source, report, self._request.prefix_landed, "fetch")
        outcome = await self._run_prefill(
            fetch, report, timeout_s=self._coordinator._context.settings.prefill_progress_s
        )
        self._coordinator.prefix_fetches[_OUTCOMES[outcome.status]] += 1
        if outcome.status is Status.COMPLETE:
            self._request.prefix_worker = source.worker_id
        elif not self._request.ended.done():
            log.info("no prefix from %s: %s", source.worker_id, outcome.reason, extra=self._request.log_fields)

    async def _prefill_by(self, candidate: pb.PrefillCandidate, report: _CacheReport) -> Outcome:
        prefill = self._make(RemotePrefill, candidate, report, self._request.pages_landed, "remote prefill")
        outcome = await self._run_prefill(prefill, report)
        self._coordinator.remote_prefills[_OUTCOMES[outcome.status]] += 1
        self._request.send(outcome.ended)
        return outcome

    def _make(
        self,
        kind: type[RemotePrefill],
        candidate: pb.PrefillCandidate | pb.PrefixSource,
        report: _CacheReport,
        on_landed: Callable[[pb.Landed], None],
        name: str,
    ) -> RemotePrefill:
        trace = self._request.trace
        return kind(
            self._parts[0],
            candidate,
            cached_tokens=report.cached_tokens,
            context=self._coordinator._context,
            landings=self._coordinator._landings,
            on_first=self._request.send,
            on_landed=on_landed,
            traceparent=trace.ask(name, candidate.worker_id) if trace is not None else "",
            open_choices=lambda: self._request.open,
        )

    async def _run_prefill(
        self, prefill: RemotePrefill, report: _CacheReport, timeout_s: float | None = None
    ) -> Outcome:
        """Runs a remote prefill, and cancels it when the request ends, or after `timeout_s`."""
        coordinator = self._coordinator
        if not coordinator._context.model.state.has_memory:
            return Outcome(Status.INTERRUPTED)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if report.missing:
            coordinator._arriving[report.missing] = ended
        task = coordinator.running[prefill] = asyncio.create_task(prefill.run(), name="remote-prefill")
        task.add_done_callback(lambda _: coordinator.running.pop(prefill))
        ends: list[asyncio.Future[Any]] = [prefill.outcome, self._request.ended]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not prefill.outcome.done():
            prefill.cancel()
        outcome = await prefill.outcome
        if report.missing:
            del coordinator._arriving[report.missing]
        ended.set_result(None)
        if outcome.failure is not None:
            coordinator.failures[outcome.failure.value] += 1
        if self._request.trace is not None:
            self._request.trace.answered(outcome.reason if outcome.failure is not None else "")
        return outcome

    def _continue_after(self, first: Sequence[Output]) -> None:
        if not first:
            return
        (request,) = self._parts
        self._awaited = None
        self._parts = [
            _continuation(request, output)
            for output in first
            if output.finish is None and output.choice in self._request.open
        ]
        for part in self._parts:
            self._request.engine_ids.append(part.id)
            self._coordinator._on_engine_id(part.id, self._request)


_OUTCOMES = {
    Status.COMPLETE: "completed",
    Status.FINISHED: "completed",
    Status.FAILED: "failed",
    Status.INTERRUPTED: "cancelled",
    Status.CANCELLED: "cancelled",
}


def _add_all(engine: Engine, requests: Sequence[Request], closed: Collection[int], *, resumed: bool) -> None:
    """Adds all of `requests` to the engine, or none; then ends the choices that were aborted before.

    Args:
        resumed: See `Engine.add`.

    Raises:
        QueueFullError: The engine's queue has no room.
        ValueError: A request can never be served here.
    """
    try:
        for request in requests:
            engine.add(request, resumed=resumed)
    except (QueueFullError, ValueError):
        for request in requests:
            engine.abort(request.id)
        raise
    if closed:
        for request in requests:
            engine.abort(request.id, list(closed))


def _continuation(request: Request, output: Output) -> Request:
    """Returns the rest of one choice of `request` after its first token was sent."""
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

"""A request in the router, and its attempts: which of its choices run on which worker.

A request starts with one attempt for all its choices. When its worker refuses it or is lost, the attempt is sent to
another one; if output exists by then, it is split into one attempt per choice, since each must be replayed with its own
tokens. `dispatcher.py` decides when; this module keeps the records.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cpd.common.blocks import BLOCK_SIZE, TOKEN_BYTES, extend_hashes, pack_tokens
from cpd.common.logs import fields
from cpd.performance.model import MAX_MS
from cpd.planner.load import RequestClass
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError
from router.dispatch.output import Choice
from router.dispatch.worker_session import WorkerSession
from router.errors import ApiError
from router.placement.decisions import Decision
from router.placement.learning import WorkerErrors
from router.placement.moves import Move
from router.placement.policy import Placement

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan, Value

PROBATION_TOKENS = 4
"""A request whose worker crashed is a suspect until it has this many more tokens. They take it past the step at which
the worker crashed: an engine is at most two steps ahead of the tokens that it has sent."""

FETCH_TOKENS = 64
"""An attempt that moves computes up to this many uncached tokens on its new worker: a fetch takes no less time."""


@dataclass(slots=True)
class RequestRoute:
    """Where a request's first token was computed.

    Attributes:
        prefill_worker: Empty if the decode worker computed the prompt itself.
        cached_tokens: Prompt tokens taken from a cache.
        queue_ms: Time in the queue of the worker that computed the prompt.
        wake_ms: Time that the request has waited for workers to wake, usually a part of `queue_ms`.
    """

    decode_worker: str
    prefill_worker: str
    cached_tokens: int
    queue_ms: float
    wake_ms: float = 0.0

    @property
    def kind(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill_worker else "local"


class Consumer(Protocol):
    """Is told about the progress of requests. Called on the event loop; must not block."""

    def started(self, route: RequestRoute) -> None:
        """The first output of a request has arrived. Called once per request."""

    def updated(self, choice: Choice) -> None:
        """A choice has new text, or has ended."""

    def failed(self, error: ApiError) -> None:
        """A request has failed. Called at most once per request, and last."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One prompt and how to continue it.

    Attributes:
        trace_id: The client's request id, for logs.
        tokens, hash_root, block_hashes: The prompt's tokens and the hashes of its full blocks, as on the wire.
        prompt_len: Tokens of the prompt.
        fingerprint: Fingerprint of the model the request was started on; only workers with the same one continue it.
        choices: The outputs to generate.
        priority: Higher goes first.
        received: Loop time at which the request came.
        needed_at: Loop time after which the client has no use for a first token.
        ticks: The times of its outputs are remembered for `GET /requests/{id}`.
        trace: The span of its call; None if that is not traced.
        load_class: Its class in what the planner measures; None before the first placement.
        outputs: Tokens of each choice so far.
        started: Some choice has output.
        gives_up_at: Loop time at which it is given up without a first token, not counting waits for a wake; infinite
            before the first placement.
        wake_s: Time that its placements without a token have waited for a wake, but for the present one.
        expiry: Gives the request up if it has waited too long; None if it has output.
    """

    trace_id: str
    tenant: str
    tokens: bytes
    fingerprint: bytes
    hash_root: bytes
    block_hashes: list[bytes]
    sampling: pb.Sampling
    choices: Sequence[Choice]
    consumer: Consumer
    priority: int
    received: float
    needed_at: float = inf
    ticks: bool = False
    trace: "TracedSpan | None" = None
    prompt_len: int = field(init=False)
    load_class: RequestClass | None = field(init=False, default=None)
    outputs: list[list[int]] = field(init=False)
    started: bool = field(init=False, default=False)
    attempts: set["Attempt"] = field(init=False, default_factory=set)
    gives_up_at: float = field(init=False, default=inf)
    wake_s: float = field(init=False, default=0.0)
    expiry: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in self.choices]
        self.prompt_len = len(self.tokens) // TOKEN_BYTES

    @property
    def log_fields(self) -> dict[str, dict[str, object]]:
        """Names the request in a log line."""
        return fields(request_id=self.trace_id, tenant=self.tenant)

    @property
    def digest(self) -> bytes:
        """A hash of tenant, model, prompt and sampling, except the seed, which is random if the client sends none."""
        sampling = pb.Sampling()
        sampling.CopyFrom(self.sampling)
        sampling.ClearField("seed")
        known = self.block_hashes  # chained: the last one stands for all full blocks
        rest = self.tokens[len(known) * BLOCK_SIZE * TOKEN_BYTES :]
        parts = (known[-1] if known else self.hash_root, rest, sampling.SerializeToString(deterministic=True))
        return blake2b(b"".join(blake2b(part).digest() for part in parts), digest_size=16).digest()

    def end_expiry(self) -> None:
        """The request is not given up any more."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    @property
    def waits_for_wake(self) -> bool:
        """True while one of its choices waits for its worker to wake."""
        return any(attempt.waits_since is not None for attempt in self.attempts)

    def with_output(self, emitted: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """The tokens of prompt and `emitted` together, and the hashes of their full blocks."""
        known = self.block_hashes
        if not emitted:
            return self.tokens, known
        tokens, parent = self.tokens + pack_tokens(emitted), known[-1] if known else self.hash_root
        return tokens, known + extend_hashes(parent, tokens[len(known) * BLOCK_SIZE * TOKEN_BYTES :])


class FullQueue(NamedTuple):
    """A worker's queue that had no room.

    Attributes:
        retry_after_s: Time in which what waits there will have been computed.
        over_share: Only this tenant's share of the queue was full.
    """

    retry_after_s: float
    over_share: bool


@dataclass(frozen=True, slots=True)
class Parked:
    """Where an attempt was parked.

    Attributes:
        session: The worker.
        name: The name that the worker knows the attempt by.
        target: The only worker that it moves to; empty: any.
    """

    session: WorkerSession
    name: pb.Park
    target: str

    def placement(self, placement: Placement, blocks: int) -> Placement:
        """Returns the placement with a fetch of `blocks` blocks from this worker, unless it is the one that decodes."""
        if placement.decode.worker_id == self.session.id:
            return replace(placement, prefill=(), prefix_source=None)
        assert self.session.worker_load is not None
        return replace(
            placement,
            prefill=(),
            prefix_source=self.session.worker_load.candidate,
            prefix_source_blocks=blocks,
            long_prefill_tokens=FETCH_TOKENS,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """Some choices of a request, sent to one worker after another until they are done.

    Attributes:
        choices: Indices of the choices that are not done yet.
        number: `Submit.attempt` of the last Submit; -1 before the first one.
        session: The worker it runs on; None while it waits for one.
        prefill_session: The worker that computes its prompt; None once the first token is there.
        decision: The record of its current placement.
        refused_by: Workers that refused it since it last lost or waited for a worker; they are not tried again.
        queue_full: Their full queues.
        failed_prefill: Prefill workers that failed it; they are not tried again.
        losses, lost_by: Workers lost while running it. They get it again only if there are no others.
        crashes: Those that crashed, since its probation last ended. Not empty: the attempt is a suspect.
        crashed_at: Loop time at which the last of them was noticed.
        probation: Tokens until it is no longer a suspect.
        deadline: Loop time until which it may wait for a worker; None if it did not wait since its last token.
        timer: Retries it while it waits; None otherwise.
        waits_since: Loop time since which it waits for a worker to wake; None: it does not.
        promised_at: Loop time at which that worker serves at the latest, as it first promised; None: it has not.
        park_asked: Its worker was asked to park it, since that worker's last load report.
        move: Why its worker was asked to park it, and where it goes; None if the worker gives all its attempts away.
        stays_until: Loop time before which it is not moved again, because no other worker took it.
        moved_at: Loop time at which it last moved.
        parked: The worker that keeps its pages until it has a token from another one; None if it does not move.
        trace: The span of its current placement; None if the request is not traced.
    """

    id: int
    request: RoutedRequest
    choices: set[int]
    number: int = -1
    session: WorkerSession | None = None
    trace: "TracedSpan | None" = None
    prefill_session: WorkerSession | None = None
    decision: Decision | None = None
    refused_by: set[str] = field(default_factory=set)
    queue_full: list[FullQueue] = field(default_factory=list)
    failed_prefill: set[str] = field(default_factory=set)
    losses: int = 0
    lost_by: set[str] = field(default_factory=set)
    crashes: list[str] = field(default_factory=list)
    crashed_at: float = 0.0
    probation: int = 0
    failures: int = 0
    reroutes: int = 0
    deadline: float | None = None
    timer: asyncio.TimerHandle | None = None
    waits_since: float | None = None
    promised_at: float | None = None
    park_asked: bool = False
    move: Move | None = None
    stays_until: float = 0.0
    moved_at: float = -inf
    parked: Parked | None = None

    @property
    def workers(self) -> list[WorkerSession]:
        """The workers that have its choices and, without a first token, its prompt."""
        return [one for one in (self.session, self.prefill_session) if one is not None]

    @property
    def longest(self) -> int:
        """The most tokens that prompt and output may have."""
        return self.request.prompt_len + self.request.sampling.max_tokens

    @property
    def emitted(self) -> Sequence[int]:
        """The output tokens to continue after. Before the first output all choices have none."""
        return self.request.outputs[min(self.choices)]

    @property
    def may_wait(self) -> bool:
        """True if it may wait for a worker: it has run before, or was rerouted and found no full queue."""
        return bool(self.losses or self.crashes or self.request.started or (self.reroutes and not self.queue_full))

    def submit(self, placement: Placement, tokens: bytes, hashes: Sequence[bytes], deadline_ms: int) -> pb.Submit:
        """The message that sends the attempt to the worker of a placement.

        Args:
            tokens, hashes: Prompt and output so far, and the hashes of their full blocks.
            deadline_ms: Time left for the first token.
        """
        request, prefix_source = self.request, None
        if request.trace is not None:
            about: dict[str, Value] = {
                "cpd.attempt": self.number + 1,
                "cpd.route": placement.route,
                "cpd.worker": placement.decode.worker_id,
                "cpd.predicted_ttft_ms": placement.chosen.ttft_ms,
            }
            self.trace = request.trace.child("attempt", time.monotonic(), "CLIENT", about)
        if source := placement.prefix_source:
            blocks = placement.prefix_source_blocks
            prefix_source = pb.PrefixSource(worker_id=source.worker_id, address=source.address, blocks=blocks)
        return pb.Submit(
            request=self.id,
            attempt=self.number + 1,
            tokens=tokens,
            prompt_len=request.prompt_len,
            hash_root=request.hash_root,
            block_hashes=b"".join(hashes),
            sampling=request.sampling,
            n=len(self.choices),
            choice=min(self.choices),
            tenant=request.tenant,
            prefill_candidates=[
                pb.PrefillCandidate(worker_id=one.worker_id, address=one.address) for one in placement.prefill
            ],
            long_prefill_tokens=placement.long_prefill_tokens,
            prefix_source=prefix_source,
            trace_id=request.trace_id,
            priority=request.priority,
            deadline_ms=deadline_ms,
            traceparent=self.trace.traceparent if self.trace is not None else "",
        )

    def attach(self, placement: Placement, decode: WorkerSession, prefill: WorkerSession, now: float) -> Decision:
        """Records that the attempt was sent to `decode`, and its prompt to `prefill` (perhaps the same)."""
        assert decode.worker_load is not None
        assert prefill.worker_load is not None
        self.number += 1
        self.session, self.prefill_session, self.park_asked = decode, prefill, False
        decode.worker_load.sequences_started(len(self.choices))
        prefill.worker_load.prompt_sent(self.id, placement.chosen.cost.prefill_ms, now)
        request, choice = self.request, min(self.choices)
        self.decision = Decision(
            request.tenant,
            request.trace_id,
            placement,
            request.prompt_len,
            self.number,
            choice,
            received=request.received,
            placed_at=now,
            streams=placement.decode.decodes,
            ticks=array("f") if request.ticks else None,
        )
        return self.decision

    def check(self, output: pb.Output, token_ids: Sequence[int]) -> None:
        """Raises ProtocolError if a figure of an output is out of range, or the last token does not end its choice."""
        request, sampling = self.request, self.request.sampling
        known = len(request.outputs[output.choice])
        hello = self.session.hello if self.session is not None else None
        vocab_size = hello.vocab_size if hello is not None else 0
        if not token_ids:
            raise ProtocolError("it sent an output without tokens")
        if max(token_ids) >= vocab_size:
            raise ProtocolError(f"it sent token id {max(token_ids)}, but its vocabulary has {vocab_size}")
        left = sampling.max_tokens - known - len(token_ids)
        if left < 0:
            raise ProtocolError(f"it sent more than the {sampling.max_tokens} tokens that a request asked for")
        if left == 0 and output.finish == pb.FINISH_NONE:  # a replay would have nothing left to compute
            raise ProtocolError(f"it did not end a choice with the last of its {sampling.max_tokens} tokens")
        if output.HasField("prefilled"):
            _check_prefilled(output.prefilled, request.prompt_len + known)
        if output.HasField("landed"):
            _check_landed(output.landed)
        scores = output.logprobs
        if len(scores) != len(token_ids) * sampling.HasField("top_logprobs"):
            raise ProtocolError(f"it sent {len(token_ids)} tokens and log-probabilities of {len(scores)}")
        for score in scores:
            if len(score.top_ids) != len(score.top_logprobs) or max(score.top_ids, default=0) >= vocab_size:
                raise ProtocolError("it sent log-probabilities of tokens that do not exist")
            if not all(logprob < inf for logprob in (score.logprob, *score.top_logprobs)):
                raise ProtocolError("it sent log-probabilities that are not numbers")

    def on_output(self, output: pb.Output, now: float) -> tuple[WorkerErrors, Placement, float, float] | None:
        """Records that tokens of a choice have arrived. Returns what there is to learn: see `Learning.first_token`."""
        self.deadline = None
        decision, computed_by, first = self.decision, self.prefill_session, None
        if decision is None:
            return None
        if computed_by is not None:
            prefilled = output.prefilled
            decision.on_prefilled(prefilled)
            as_planned = (prefilled.prefill_worker or decision.placement.decode.worker_id) == computed_by.id
            woke = bool(decision.wake_s or decision.placement.chosen.cost.wake_ms)  # says nothing about the speed
            if as_planned and self.parked is None and not woke and computed_by.worker_load is not None:
                placement, actual_ms = decision.placement, (now - decision.placed_at) * 1e3
                first = computed_by.worker_load.errors, placement, actual_ms, now
            self._prompt_computed()
        if output.HasField("landed"):
            decision.landed = pb.Landed()
            decision.landed.CopyFrom(output.landed)
        if decision.choice == output.choice:
            decision.on_output(now)
        return first

    def crashed(self, worker_id: str, now: float) -> None:
        """Records that a worker that ran it, or computed its prompt, has crashed."""
        self.crashes.append(worker_id)
        self.crashed_at, self.probation = now, PROBATION_TOKENS

    def choice_done(self, choice: int) -> None:
        """Records that a choice has ended."""
        self.choices.discard(choice)
        if self.session is not None and self.session.worker_load is not None:
            self.session.worker_load.sequences_ended(1)

    def detach(self, outcome: str, now: float) -> None:
        """Records that the attempt no longer runs on a worker."""
        self._prompt_computed()
        if self.decision is not None:
            if not self.request.started:
                self.request.wake_s += self.decision.wake_s
            self.decision.end(outcome, now)
            self.decision = None
        if self.trace is not None:
            self.trace.set({"cpd.outcome": outcome})
            self.trace.end(time.monotonic(), "" if outcome in ("finished", "cancelled") else outcome)
            self.trace = None
        if self.session is not None and self.session.worker_load is not None:
            self.session.worker_load.sequences_ended(len(self.choices))
        self.session = None

    def _prompt_computed(self) -> None:
        if self.prefill_session is not None and self.prefill_session.worker_load is not None:
            self.prefill_session.worker_load.prompt_answered(self.id)
        self.prefill_session = None


def _check_prefilled(prefilled: pb.Prefilled, tokens: int) -> None:
    if not 0 <= prefilled.queue_ms <= MAX_MS:
        raise ProtocolError(f"it reported a queue time of {prefilled.queue_ms} ms")
    if prefilled.cached_tokens > tokens:
        raise ProtocolError(f"it reported {prefilled.cached_tokens} cached tokens of a shorter prompt")
    if prefilled.HasField("fetched"):
        _check_landed(prefilled.fetched)
    if not (prefilled.prefill_worker.isascii() and prefilled.prefill_worker.isprintable()):  # a response header
        raise ProtocolError(f"it reported a prefill worker {prefilled.prefill_worker!r}")


def _check_landed(landed: pb.Landed) -> None:
    if not 0 <= landed.waited_ms <= MAX_MS:
        raise ProtocolError(f"it reported pages that came after {landed.waited_ms} ms")

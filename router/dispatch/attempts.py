"""A request in the router, and its attempts: which of its choices run on which worker.

A request starts with one attempt for all its choices. When its worker refuses it or is lost, the attempt is sent to
another one; if output exists by then, it is split into one attempt per choice, since each must be replayed with its own
tokens. `dispatcher.py` decides when; this module keeps the books.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from cpd.common.blocks import BLOCK_SIZE, TOKEN_BYTES, extend_hashes, pack_tokens
from cpd.performance.model import MOST_MS
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError
from router.dispatch.worker_session import WorkerSession
from router.errors import ApiError
from router.placement.decisions import Decision
from router.placement.policy import Placement


@dataclass(frozen=True, slots=True)
class RequestRoute:
    """Where a request's first token was computed.

    Attributes:
        prefill_worker: Empty if the decode worker computed the prompt itself.
        cached_tokens: Prompt tokens taken from a cache.
    """

    decode_worker: str
    prefill_worker: str
    cached_tokens: int

    @property
    def kind(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill_worker else "local"


class Consumer(Protocol):
    """Receives a request's tokens. Called on the event loop; must not block."""

    def started(self, route: RequestRoute) -> None:
        """The first output has arrived. Called once per request."""

    def output(self, choice: int, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int) -> bool:
        """New tokens of a choice, the last ones if `finish` is set. Returns whether the choice wants more."""

    def failed(self, error: ApiError) -> None:
        """The request has failed. Called at most once, and last."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One prompt and how to continue it.

    Attributes:
        trace_id: The client's request id, for logs.
        fingerprint: Fingerprint of the model the request was started on; only workers with the same one continue it.
        tokens, hash_root, block_hashes: The prompt's tokens and the hashes of its full blocks, as on the wire.
        priority: Higher goes first.
        received: Loop time at which the request came.
        outputs: Tokens of each choice so far.
        started: Some choice has output.
    """

    trace_id: str
    tenant: str
    tokens: bytes
    fingerprint: bytes
    hash_root: bytes
    block_hashes: list[bytes]
    sampling: pb.Sampling
    n: int
    consumer: Consumer
    priority: int
    received: float
    outputs: list[list[int]] = field(init=False)
    started: bool = field(init=False, default=False)
    attempts: set["Attempt"] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.n)]

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    def with_output(self, emitted: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """The tokens of prompt and `emitted` together, and the hashes of their full blocks."""
        known = self.block_hashes
        if not emitted:
            return self.tokens, known
        tokens, parent = self.tokens + pack_tokens(emitted), known[-1] if known else self.hash_root
        return tokens, known + extend_hashes(parent, tokens[len(known) * BLOCK_SIZE * TOKEN_BYTES :])


@dataclass(slots=True, eq=False)
class Attempt:
    """Some choices of a request, sent to one worker after another until they are done.

    Attributes:
        choices: Those not done yet.
        number: Counts the Submits; `Submit.attempt` on the wire. -1 before the first.
        session: The worker it runs on; None while parked.
        prefill_session: The worker that computes its prompt; None once the first token is there.
        decision: The current placement's record.
        refused_by: Workers that refused it since it was last lost or parked; it is not offered to them.
        queue_full: Their refusals because of full queues.
        failed_prefill: Prefill workers that failed it; they are not offered again.
        losses, lost_by: Workers lost while running it. They get it again only if there are no others.
        deadline: Loop time until which it may be parked; None if it never was since its last token.
    """

    id: int
    request: RoutedRequest
    choices: set[int]
    number: int = -1
    session: WorkerSession | None = None
    prefill_session: WorkerSession | None = None
    decision: Decision | None = None
    refused_by: set[str] = field(default_factory=set)
    queue_full: list[pb.Refusal] = field(default_factory=list)
    failed_prefill: set[str] = field(default_factory=set)
    losses: int = 0
    lost_by: set[str] = field(default_factory=set)
    failures: int = 0
    reroutes: int = 0
    deadline: float | None = None
    timer: asyncio.TimerHandle | None = None

    def attach(self, placement: Placement, decode: WorkerSession, prefill: WorkerSession, now: float) -> Decision:
        """Records that the attempt was sent to `decode`, and its prompt to `prefill` (perhaps the same)."""
        assert decode.worker_load is not None
        assert prefill.worker_load is not None
        self.number += 1
        self.session, self.prefill_session = decode, prefill
        decode.worker_load.sequences_started(len(self.choices))
        prefill.worker_load.prompt_sent(self.id, placement.chosen.cost.prefill_ms, now)
        request, choice = self.request, min(self.choices)
        self.decision = Decision(
            request.tenant, request.trace_id, placement, request.prompt_len, self.number, choice, placed_at=now
        )
        return self.decision

    def check(self, output: pb.Output) -> None:
        """Raises ProtocolError if the figures of an output would break the text or the JSON made from it."""
        request, token_ids, prefilled = self.request, output.token_ids, output.prefilled
        known = request.outputs[output.choice]
        hello = self.session.hello if self.session is not None else None
        vocab_size = hello.vocab_size if hello is not None else 0
        if not token_ids:
            raise ProtocolError("it sent an output without tokens")
        if max(token_ids) >= vocab_size:
            raise ProtocolError(f"it sent token id {max(token_ids)}, but its vocabulary has {vocab_size}")
        if len(known) + len(token_ids) > request.sampling.max_tokens:
            raise ProtocolError(f"it sent more than the {request.sampling.max_tokens} tokens that a request asked for")
        if not 0 <= prefilled.queue_ms <= MOST_MS:
            raise ProtocolError(f"it said that a request waited {prefilled.queue_ms} ms")
        if prefilled.cached_tokens > request.prompt_len + len(known):
            raise ProtocolError(f"it said that {prefilled.cached_tokens} tokens of a shorter prompt were cached")
        scores = output.logprobs
        if len(scores) != len(token_ids) * request.sampling.HasField("top_logprobs"):
            raise ProtocolError(f"it sent {len(token_ids)} tokens and log-probabilities of {len(scores)}")
        for score in scores:
            if len(score.top_ids) != len(score.top_logprobs) or max(score.top_ids, default=0) >= vocab_size:
                raise ProtocolError("it sent log-probabilities of tokens that do not exist")
            if not all(logprob < inf for logprob in (score.logprob, *score.top_logprobs)):
                raise ProtocolError("it sent log-probabilities that are not numbers")

    def on_output(self, choice: int, prefilled: pb.Prefilled, now: float) -> None:
        """Records that tokens of a choice have come. With the first ones `prefilled` describes the prefill."""
        self.deadline = None
        decision, computed_by = self.decision, self.prefill_session
        if decision is None:
            return
        if computed_by is not None:
            decision.prefilled.CopyFrom(prefilled)
            as_planned = (prefilled.prefill_worker or decision.placement.decode.worker_id) == computed_by.id
            if as_planned and computed_by.worker_load is not None:
                placement, actual_ms = decision.placement, (now - decision.placed_at) * 1e3
                computed_by.worker_load.ttft_errors.add(
                    placement.chosen.ttft_ms, actual_ms, placement.prompt_worker.tardiness, now
                )
            self._prompt_computed()
        if decision.choice == choice:
            decision.on_output(now)

    def choice_done(self, choice: int) -> None:
        """Records that a choice has ended, or that its client wants no more of it."""
        self.choices.discard(choice)
        if self.session is not None and self.session.worker_load is not None:
            self.session.worker_load.sequences_ended(1)

    def detach(self, outcome: str) -> None:
        """Records that the attempt runs on no worker any more."""
        self._prompt_computed()
        if self.decision is not None:
            self.decision.outcome = outcome
            self.decision = None
        if self.session is not None and self.session.worker_load is not None:
            self.session.worker_load.sequences_ended(len(self.choices))
        self.session = None

    def _prompt_computed(self) -> None:
        if self.prefill_session is not None and self.prefill_session.worker_load is not None:
            self.prefill_session.worker_load.prompt_answered(self.id)
        self.prefill_session = None

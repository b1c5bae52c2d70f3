"""A request as the router keeps it, and its legs: which of its choices are on which worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from cpd.blocks import BLOCK_SIZE, TOKEN_BYTES, extend_hashes, pack_tokens
from cpd.perfmodel import MOST_MS
from cpd.rpc import cpd_pb2 as pb
from router.checks import NonsenseError
from router.errors import ApiError
from router.history import Record
from router.policy import Placement
from router.sessions import Session

_FINISH_REASONS = frozenset(pb.FinishReason.values())


@dataclass(frozen=True, slots=True)
class Route:
    """Where the first token of a request was made.

    Attributes:
        prefill_worker: Empty where the decode worker computed the prompt itself.
        cached_tokens: Prompt tokens that were taken from a cache.
    """

    decode_worker: str
    prefill_worker: str
    cached_tokens: int

    @property
    def kind(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill_worker else "local"


class Consumer(Protocol):
    """Who takes a request's tokens. Called on the event loop; must not block."""

    def started(self, route: Route) -> None:
        """The first output is there (once a request)."""

    def output(self, choice: int, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int) -> bool:
        """New tokens of a choice; the last ones where `finish` is set. Returns whether the choice wants more."""

    def failed(self, error: ApiError) -> None:
        """The request is over (once, and last)."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and how to continue it.

    Attributes:
        trace_id: The client's request id, for logs.
        tenant: Whose request it is.
        fingerprint: Of the model that the request was started on; no other one can go on with it.
        tokens, hash_root, block_hashes: As on the wire; the prompt's tokens, and hashes of the prompt's full blocks.
        priority: Higher ones go first.
        received: When it came, in loop time.
        outputs: Tokens of each choice so far.
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
    legs: set["Leg"] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.n)]

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    def after(self, emitted: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """The tokens of the prompt and what follows it, and the hashes of all their full blocks; the prompt's are not
        computed again."""
        known = self.block_hashes
        if not emitted:
            return self.tokens, known
        tokens, parent = self.tokens + pack_tokens(emitted), known[-1] if known else self.hash_root
        return tokens, known + extend_hashes(parent, tokens[len(known) * BLOCK_SIZE * TOKEN_BYTES :])


@dataclass(slots=True, eq=False)
class Leg:
    """Some choices of a request on one worker.

    Attributes:
        choices: Those that are not done.
        attempt: Submits before the last one; -1 before the first.
        session: Where it runs; None while parked.
        prefill_session: Where its prompt is computed; None where nobody does that any more.
        record: Of its last placement.
        refused_by: Workers that gave it back in this round; they come last.
        lost_by: Workers that were lost while they had it; it goes to them only where there are no others.
        full: Refusals because of full queues, in this round.
        failed_prefill: Prefill workers that were tried in vain; they are not offered again.
        deadline: Loop time until which it may be parked; None before it is.
    """

    id: int
    request: Request
    choices: set[int]
    attempt: int = -1
    session: Session | None = None
    prefill_session: Session | None = None
    record: Record | None = None
    refused_by: set[str] = field(default_factory=set)
    full: list[pb.Refusal] = field(default_factory=list)
    failed_prefill: set[str] = field(default_factory=set)
    losses: int = 0
    lost_by: set[str] = field(default_factory=set)
    failures: int = 0
    reroutes: int = 0
    deadline: float | None = None
    timer: asyncio.TimerHandle | None = None

    def attach(self, placement: Placement, decode: Session, prefill: Session, now: float) -> Record:
        """The leg is on a worker from now on, and its prompt there or on another one."""
        assert decode.view is not None
        assert prefill.view is not None
        self.attempt += 1
        self.session, self.prefill_session = decode, prefill
        decode.view.began(len(self.choices))
        prefill.view.sent(self.id, placement.chosen.prefill_ms, now)
        request = self.request
        first = min(self.choices)
        self.record = Record(
            request.tenant, request.trace_id, placement, request.prompt_len, self.attempt, first, placed_at=now
        )
        return self.record

    def check(self, output: pb.Output) -> None:
        """Raises NonsenseError where no worker can mean what it sent of a choice of this leg."""
        request, token_ids, prefilled = self.request, output.token_ids, output.prefilled
        known = request.outputs[output.choice]
        hello = self.session.hello if self.session is not None else None
        vocab_size = hello.vocab_size if hello is not None else 0
        if not token_ids:
            raise NonsenseError("it sent an output without tokens")
        if max(token_ids) >= vocab_size:
            raise NonsenseError(f"it sent token id {max(token_ids)}, but its vocabulary has {vocab_size}")
        if len(known) + len(token_ids) > request.sampling.max_tokens:
            raise NonsenseError(f"it sent more than the {request.sampling.max_tokens} tokens that a request asked for")
        _check_logprobs(output, request.sampling, vocab_size)
        if output.finish not in _FINISH_REASONS:
            raise NonsenseError(f"it sent the finish reason {output.finish}, which there is not")
        if output.finish == pb.FINISH_STOP and token_ids[-1] not in request.sampling.stop_token_ids:
            raise NonsenseError(f"it ended a request with token id {token_ids[-1]}, which does not end it")
        if not 0 <= prefilled.queue_ms <= MOST_MS:
            raise NonsenseError(f"it said that a request waited {prefilled.queue_ms} ms")
        tokens = request.prompt_len + len(known)
        if prefilled.cached_tokens > tokens:
            raise NonsenseError(f"it said that {prefilled.cached_tokens} of {tokens} tokens were cached")
        placement = self.record.placement if self.record is not None else None
        asked = [one.worker_id for one in placement.prefill] if placement else []
        if prefilled.prefill_worker and prefilled.prefill_worker not in asked:
            raise NonsenseError(f"it named the prefill worker {prefilled.prefill_worker!r}, which was not to be asked")
        source = placement.cached_at.worker_id if placement and placement.cached_at else ""
        if prefilled.prefix_worker not in ("", source):
            raise NonsenseError(f"it named the cache of {prefilled.prefix_worker!r}, which was not to be asked")

    def output(self, choice: int, prefilled: pb.Prefilled, now: float) -> None:
        """A token came; `prefilled` tells of the prompt if it is the attempt's first one."""
        self.deadline = None
        record, computed_by = self.record, self.prefill_session
        if record is None:
            return
        if computed_by is not None:
            record.prefilled.CopyFrom(prefilled)
            planned = (prefilled.prefill_worker or record.placement.decode.worker_id) == computed_by.id
            if planned and computed_by.view is not None:
                placement, actual_ms = record.placement, (now - record.placed_at) * 1e3
                computed_by.view.predictions.add(placement.chosen.ttft_ms, actual_ms, placement.computes.late, now)
            self._prompt_computed()
        if record.choice == choice:
            record.output(now)

    def choice_done(self, choice: int) -> None:
        """A choice has ended, or nobody wants more of it."""
        self.choices.discard(choice)
        if self.session is not None and self.session.view is not None:
            self.session.view.ended(1)

    def detach(self, outcome: str) -> None:
        """The leg is on no worker any more."""
        self._prompt_computed()
        if self.record is not None:
            self.record.outcome = outcome
            self.record = None
        if self.session is not None and self.session.view is not None:
            self.session.view.ended(len(self.choices))
        self.session = None

    def _prompt_computed(self) -> None:
        if self.prefill_session is not None and self.prefill_session.view is not None:
            self.prefill_session.view.answered(self.id)
        self.prefill_session = None


def _check_logprobs(output: pb.Output, sampling: pb.Sampling, vocab_size: int) -> None:
    tokens, scores = len(output.token_ids), output.logprobs
    if len(scores) != tokens * sampling.HasField("top_logprobs"):
        raise NonsenseError(f"it sent log-probabilities of {len(scores)} tokens with {tokens} tokens")
    for score in scores:
        if len(score.top_ids) != len(score.top_logprobs) or max(score.top_ids, default=0) >= vocab_size:
            raise NonsenseError("it sent log-probabilities of tokens that there are not")
        if not all(logprob < inf for logprob in (score.logprob, *score.top_logprobs)):
            raise NonsenseError("it sent log-probabilities that are no numbers")

"""Requests, outputs and figures: what goes into the engine and what comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cpd.common.blocks import Tier
from cpd.grammar.constraint import TokenConstraint
from cpd.grammar.grammar import Grammar

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token: dividing by them would overflow."""

_GRACE = 32
"""Number of tokens after a thinking budget among which reasoning ends: a grammar does not let it end within a
character."""


class Finish(IntEnum):
    """Why a choice ended. The values are those of the wire's FinishReason."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit on the tokens of an output's reasoning.

    Attributes:
        tokens: Most tokens, without the one that begins it.
        end_token: Ends it.
        start_token: An output that begins with it reasons; None if every one does, because the prompt has begun it.
    """

    tokens: int
    end_token: int
    start_token: int | None = None

    def may_end(self, num_output: int) -> bool:
        """True if a reasoning that still goes on after this many tokens of output must end."""
        past = num_output - self.tokens - (self.start_token is not None)
        return 0 <= past < _GRACE

    def must_end(self, output: npt.NDArray[np.int32]) -> bool:
        """True if the next token of an output must end its reasoning. [tokens so far]"""
        if not self.may_end(len(output)) or (self.start_token is not None and output[0] != self.start_token):
            return False
        return not (output == self.end_token).any()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Penalties, min and max tokens count output tokens, from `Request.prompt_len` on.

    `router/api/sampling.py` names the files that a parameter passes through before it is used here.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p, top_k, min_p: Filters; 1, 0 and 0 turn them off.
        presence_penalty, frequency_penalty: Subtracted from logits of tokens in the output (OpenAI's definition).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output
            (transformers' definition); 1 turns it off.
        logit_bias: Added to the logits, by token id.
        seed: Part of the noise's key, with the choice index and the token's position.
        top_logprobs: Number of alternatives to report beside the chosen token; None for no logprobs. Logprobs are of
            the model's distribution, before temperature, penalties and filters.
        max_tokens: Maximum number of output tokens.
        min_tokens: Stop tokens can't be chosen before this many output tokens.
        stop_token_ids: A choice ends with one of these, which is emitted.
        grammar: What the output must follow; None for nothing. `Request.constraint` enforces it.
        thinking_budget: Limit on the reasoning; None for no other than `max_tokens`.
        takes_most_likely: True if sampling takes the most likely token of unchanged logits, and reports no logprobs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    top_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None
    takes_most_likely: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        changes = penalties or self.logit_bias or self.min_tokens or self.grammar or self.thinking_budget
        plain = self.temperature < GREEDY_BELOW and self.top_logprobs is None and not changes
        object.__setattr__(self, "takes_most_likely", plain)  # the class is frozen

    def looks_back(self, num_output: int) -> bool:
        """True if sampling itself, not only the model, depends on the `num_output` tokens of output before."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        budget = self.thinking_budget
        return bool(penalties or self.grammar is not None or (budget is not None and budget.may_end(num_output)))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        id: Unique among the unfinished requests of this engine.
        token_ids: The prompt, then output that was already emitted (in a replay).
        prompt_len: Number of tokens of the prompt.
        hash_root: Start of the block hash chain (model and tenant).
        block_hashes: Hashes of all full blocks of `token_ids`.
        n: Number of choices, `first_choice` .. `first_choice + n - 1`. Must be 1 in a replay.
        prefill_only: End after the first token of each choice. Its output has a `finish` only if the choice ends with
            it; otherwise the choice goes on elsewhere.
        tenant: Tenants share the queue fairly.
        priority: Requests of a higher priority go first.
        received: Time of arrival in seconds, on the clock of `Engine.step`.
        deadline: Time at which the first token is due, on the same clock.
        number: The router's number of the request.
        constraint: With `params.grammar`: its constraint at the start of an output. The engine makes copies of it.
    """

    id: str
    token_ids: Sequence[int]
    prompt_len: int
    params: SamplingParams
    hash_root: bytes
    block_hashes: list[bytes]
    first_choice: int = 0
    n: int = 1
    prefill_only: bool = False
    tenant: str = ""
    priority: int = 0
    received: float = 0.0
    deadline: float = inf
    number: int = 0
    constraint: TokenConstraint | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely tokens."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Output:
    """New tokens of one choice.

    Attributes:
        logprobs: One for each token if the request asked for them, else empty.
        finish: Set in the choice's last output.
        cached_tokens: Number of prompt tokens found in the cache. Set in a choice's first output only.
        queued_s: Time until the request was first scheduled. Set in a choice's first output only.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish | None = None
    cached_tokens: int | None = None
    queued_s: float = 0.0


@dataclass(slots=True)
class Computed:
    """Progress of a prefill-only request: its first `num_tokens` tokens are valid in `pages`, in block order."""

    request_id: str
    num_tokens: int
    pages: list[int]


@dataclass(slots=True)
class CacheEvent:
    """Blocks that have moved to this tier."""

    tier: Tier
    hashes: list[bytes]


@dataclass(slots=True)
class StepOutput:
    """The results of one engine step.

    Attributes:
        outputs: New tokens.
        computed: Progress of prefill-only requests. The pages are held until the next step; `Engine.pin` keeps them.
        failed: Requests that can never be finished, with the reason. No output of theirs follows.
    """

    outputs: list[Output] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages reserved for a prompt that another worker computes (see `engine/landings.py`).

    Attributes:
        id: Identifies the reservation among the unfinished ones; later ones may have the same id.
        generation: Unique in this engine.
        first_block: Number of leading blocks that are in the cache, and held.
        pages: One for each block from `first_block` on, the partial last one included.
    """

    id: int
    generation: int
    first_block: int
    pages: list[int]


class PoolCounts(NamedTuple):
    """Pages by owner state; they add up to the pool."""

    free: int
    cached: int
    used: int
    reserved: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class HostStats:
    """Figures of the host tier.

    Attributes:
        pages: Size in pages; 0 without a host tier.
        offloaded: Number of pages that hold a block.
        blocks: Totals since the start, by what happened to blocks: offloaded (copied out), skipped (too many were
            evicted together), evicted (for others), loaded, recomputed (although they were there), damaged.
    """

    pages: int = 0
    offloaded: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)


class EngineStats(NamedTuple):
    """A snapshot for load reports. Totals count from the start.

    Attributes:
        running, waiting: Numbers of sequences that run, and that don't.
        waiting_tokens: Tokens to compute before all sequences decode. For sequences that have never run, as estimated
            when they came.
        preemptions, prefill_tokens, decode_tokens, cached_tokens: Totals.
        queued_tokens: Tokens of requests that have never run, which the queue limit counts.
        decodes: Number of sequences with one token to compute.
        decode_context: Sum of the tokens that these attend to.
        prefill_ms: Predicted time until `waiting_tokens` are computed.
        overdue_ms: The part of `prefill_ms` that a new prompt passes if it can meet its deadline: late prompts wait.
        step_ms: Mean duration of the recent steps that had decodes; 0 if there were none.
        slowdown: Median ratio of the recent steps' measured to predicted durations; 0 if there were too few.
        awaiting_first_token: Numbers of the newest requests that have no token yet.
        started: Number of sequences that have run and have not ended.
        resumed: Number of running sequences that were parked (`Engine.park_all`).
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages: PoolCounts
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    queued_tokens: int = 0
    decodes: int = 0
    decode_context: int = 0
    prefill_ms: float = 0.0
    overdue_ms: float = 0.0
    step_ms: float = 0.0
    slowdown: float = 0.0
    host: HostStats = HostStats()
    awaiting_first_token: Sequence[int] = ()
    started: int = 0
    resumed: int = 0

    @classmethod
    def empty(cls) -> Self:
        """The figures before the engine has run."""
        return cls(0, 0, 0, PoolCounts(0, 0, 0, 0, 0), 0, 0, 0, 0)

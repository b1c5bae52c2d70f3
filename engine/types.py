"""What goes into the engine and what comes out of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from cpd.common.blocks import Tier


class Finish(IntEnum):
    """Why a choice ended (values of the wire's FinishReason)."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Penalties, min and max tokens count output tokens, from `Request.prompt_len` on.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p, top_k, min_p: Filters; 1, 0 and 0 are off.
        presence_penalty, frequency_penalty: Subtracted from logits of tokens in the output (OpenAI's definition).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output
            (transformers' definition); 1 is off.
        logit_bias: Added to the logits, by token id.
        seed: Keys the noise, with the choice index and the token's position.
        top_logprobs: None for no logprobs; otherwise how many alternatives to report beside the chosen token.
            They are of the model's distribution, before temperature, penalties and filters.
        max_tokens: Output tokens at most.
        min_tokens: Stop tokens can't be chosen before this many output tokens.
        stop_token_ids: The request ends with one of these, which is emitted.
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

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on which ones came before, beyond what the model makes of them."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        id: Unique among live requests of this engine.
        token_ids: The prompt, then output that was already emitted (after a replay).
        prompt_len: How many of them are the prompt.
        hash_root: Start of the block hash chain (model and tenant).
        block_hashes: Of all full blocks of `token_ids`.
        n: Number of choices, `first_choice` .. `first_choice + n - 1`. Only 1 where output was already emitted.
        prefill_only: Ends after the first token of each choice. Its output has a `finish` only if the choice ends
            with it; otherwise the choice goes on elsewhere.
        tenant: Tenants share the queue fairly.
        priority: Higher ones go first.
        received: When it came, in seconds by the clock that `Engine.step` is told.
        deadline: When its first token should be there, by the same clock.
        number: What its router calls it.
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


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely ones."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Output:
    """New tokens of one choice.

    Attributes:
        logprobs: One a token where the request asked for them, else empty.
        finish: Set when this is the choice's last output.
        cached_tokens: With the first output of a choice: prompt tokens that were taken from the cache.
        queued_s: With the first output of a choice: how long the request waited until it was first scheduled.
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
    """How far a prefill-only request has come: its first `num_tokens` tokens are valid in `pages`, in block order."""

    request_id: str
    num_tokens: int
    pages: list[int]


@dataclass(slots=True)
class CacheEvent:
    """Blocks that are in this tier from now on, and were not before."""

    tier: Tier
    hashes: list[bytes]


@dataclass(slots=True)
class StepOutput:
    """What one engine step brought.

    Attributes:
        outputs: New tokens.
        computed: Progress of prefill-only requests. Their pages are still held when the caller sees this, and are
            released right after unless it pins them (`Engine.pin`).
        failed: Requests that can never be finished, with the reason.
    """

    outputs: list[Output] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages set aside for a prompt that another worker computes.

    Attributes:
        id: Names the reservation among the live ones; used again later.
        generation: Never used again.
        first_block: The blocks before this one are in the cache, and held.
        pages: One for each block from `first_block` on, the partial last one included.
    """

    id: int
    generation: int
    first_block: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by owner state; they add up to the pool."""

    free: int
    cached: int
    used: int
    reserved: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class HostStats:
    """The host tier.

    Attributes:
        pages: Its size; 0: there is no host tier.
        kept: Pages that hold a block.
        blocks: Totals since the start, by what happened to blocks: kept (copied out), skipped (too many were evicted
            together), evicted (for others), returned (loaded), computed (although they were there), damaged.
    """

    pages: int = 0
    kept: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for load reports.

    Attributes:
        running, waiting: Sequences that run, and that don't.
        waiting_tokens: To be computed before all of them decode; for those never admitted as of their arrival.
        preemptions, prefill_tokens, decode_tokens, cached_tokens: Totals since the start.
        queued_tokens: Of requests that have never been admitted: what the queue's bound counts.
        decodes: Sequences that lack one token.
        decode_context: Tokens that these attend to, summed.
        prefill_ms: Predicted time until `waiting_tokens` are computed.
        late_ms: The part of it that belongs to late prompts, which a prompt that comes now and can be in time passes.
        step_ms: Mean of the recent steps that had decodes; 0: there were none.
        slower: How many times as long as predicted recent steps took, on median; 0: too few to tell.
        unanswered: Routers' numbers of the newest requests that have no token yet.
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
    late_ms: float = 0.0
    step_ms: float = 0.0
    slower: float = 0.0
    host: HostStats = HostStats()
    unanswered: Sequence[int] = ()

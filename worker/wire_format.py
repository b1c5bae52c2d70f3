"""Converts wire messages to engine types and back. Every value from the wire is checked."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cpd.common.blocks import BLOCK_SIZE, HASH_BYTES, TOKEN_BYTES, Tier, largest_token, split_hashes
from cpd.common.errors import CPDError
from cpd.grammar.grammar import MAX_BYTES, Grammar, GrammarKind
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Output, Request, SamplingParams, ThinkingBudget, TokenLogprobs

MAX_CHOICES = 4096


class InvalidRequestError(CPDError):
    """A peer sent a request that this worker can't compute."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request on this worker."""

    vocab_size: int
    max_model_len: int


def request_from_wire(
    message: pb.Submit | pb.PrefillStart, request_id: str, limits: Limits, now: float, *, prefill_only: bool = False
) -> Request:
    """Converts a submitted or a remote prefill request.

    Args:
        now: Arrival time, from `time.monotonic`.

    Raises:
        InvalidRequestError: The message contradicts itself or exceeds `limits`.
    """
    if fault := _fault(message, limits):
        raise InvalidRequestError(fault)
    return Request(
        id=request_id,
        token_ids=array("i", message.tokens),
        prompt_len=message.prompt_len,
        params=_sampling_from_wire(message.sampling, limits.vocab_size),
        hash_root=message.hash_root,
        block_hashes=split_hashes(message.block_hashes),
        first_choice=message.choice,
        n=message.n,
        prefill_only=prefill_only,
        tenant=message.tenant,
        priority=message.priority,
        received=now,
        deadline=now + message.deadline_ms / 1000 if message.deadline_ms else math.inf,
        number=message.request,
    )


def deadline_ms_to_wire(request: Request, now: float) -> int:
    """Returns the ms left until the request's deadline, at least 1; 0 if it has no deadline."""
    return 0 if request.deadline == math.inf else max(1, round((request.deadline - now) * 1000))


def output_to_wire(output: Output, request: int = 0, attempt: int = 0) -> pb.Output:
    """Converts an output for the router, or for the worker that asked for the prefill."""
    return pb.Output(
        request=request,
        attempt=attempt,
        choice=output.choice,
        token_ids=output.token_ids,
        logprobs=logprobs_to_wire(output.logprobs),
        finish=finish_to_wire(output.finish),
    )


def logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Converts the logprobs of several tokens."""
    return [
        pb.TokenLogprobs(
            logprob=entry.logprob,
            top_ids=[token for token, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in logprobs
    ]


def finish_to_wire(finish: Finish | None) -> pb.FinishReason.ValueType:
    """Converts the reason why a choice ended; None: it has not."""
    return pb.FINISH_NONE if finish is None else pb.FinishReason.ValueType(finish.value)


def tier_to_wire(tier: Tier) -> pb.Tier.ValueType:
    """Converts a tier."""
    return pb.Tier.ValueType(tier.value)


def first_outputs_from_wire(message: pb.PrefillFirstTokens, request: Request, limits: Limits) -> list[Output]:
    """Returns the first token of each choice of `request`, in choice order, from a prefill worker's report.

    Raises:
        InvalidRequestError: There is not exactly one token per choice, a token is outside the vocabulary, or the last
            token that a choice may have does not end it.
    """
    is_last = len(request.token_ids) + 1 - request.prompt_len == request.params.max_tokens
    outputs = sorted((_output_from_wire(output, request.id) for output in message.outputs), key=lambda o: o.choice)
    expected = list(range(request.first_choice, request.first_choice + request.n))
    _require(
        [output.choice for output in outputs] == expected,
        "the prefill worker's first tokens do not match the request's choices",
    )
    for output in outputs:
        _require(
            len(output.token_ids) == 1 and output.token_ids[0] < limits.vocab_size,
            "the prefill worker did not send exactly one valid token per choice",
        )
        _require(
            len(output.logprobs) == (request.params.top_logprobs is not None),
            "the prefill worker did not send the requested logprobs",
        )
        _require(
            output.finish is not None or not is_last,
            f"the prefill worker did not end a choice with the last of its {request.params.max_tokens} tokens",
        )
    return outputs


def sampling_to_wire(params: SamplingParams) -> pb.Sampling:
    """Converts sampling parameters for another worker."""
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        top_logprobs=params.top_logprobs,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        grammar=grammar_to_wire(params.grammar) if params.grammar is not None else None,
        thinking_budget=_budget_to_wire(params.thinking_budget) if params.thinking_budget is not None else None,
    )


def grammar_to_wire(grammar: Grammar) -> pb.Grammar:
    """Converts a grammar."""
    return pb.Grammar(kind=pb.Grammar.Kind.ValueType(grammar.kind.value), text=grammar.text)


def _budget_to_wire(budget: ThinkingBudget) -> pb.ThinkingBudget:
    return pb.ThinkingBudget(tokens=budget.tokens, end_token=budget.end_token, start_token=budget.start_token)


def _output_from_wire(output: pb.Output, request_id: str) -> Output:
    return Output(
        request_id=request_id,
        choice=output.choice,
        token_ids=list(output.token_ids),
        logprobs=[
            TokenLogprobs(entry.logprob, list(zip(entry.top_ids, entry.top_logprobs, strict=False)))
            for entry in output.logprobs
        ],
        finish=Finish(output.finish) if output.finish in (pb.FINISH_STOP, pb.FINISH_LENGTH) else None,
    )


def _fault(message: pb.Submit | pb.PrefillStart, limits: Limits) -> str:
    """Returns what is wrong with a request; empty if nothing is."""
    total, part = divmod(len(message.tokens), TOKEN_BYTES)
    prompt_len, n, blocks = message.prompt_len, message.n, total // BLOCK_SIZE
    if part:
        return f"tokens must have {TOKEN_BYTES} bytes each"
    if not 1 <= prompt_len <= total:
        return f"prompt_len {prompt_len} must be 1 to {total}, the number of tokens"
    if total >= limits.max_model_len:
        return f"{total} tokens leave no room for output: this worker's context is {limits.max_model_len} tokens"
    if (largest := largest_token(message.tokens)) >= limits.vocab_size:
        return f"token id {largest} is outside the vocabulary of {limits.vocab_size}"
    if len(message.hash_root) != HASH_BYTES:
        return f"hash_root must have {HASH_BYTES} bytes"
    if len(message.block_hashes) != blocks * HASH_BYTES:
        return f"block_hashes must hold {HASH_BYTES} bytes for each of the {blocks} full blocks"
    if not 1 <= n <= MAX_CHOICES:
        return f"n {n} must be 1 to {MAX_CHOICES}"
    if n > 1 and prompt_len != total:
        return "n must be 1 if output was already emitted"
    if fault := _sampling_fault(message.sampling, limits.vocab_size):
        return fault
    if total - prompt_len >= message.sampling.max_tokens:
        return f"{total - prompt_len} tokens were already emitted of at most {message.sampling.max_tokens}"
    return ""


def _sampling_fault(sampling: pb.Sampling, vocab_size: int) -> str:
    """Returns what is wrong with sampling parameters; empty if nothing is. NaN fails each comparison."""
    if not 0 <= sampling.temperature < math.inf:
        return "temperature must be finite and not negative"
    if not 0 < sampling.top_p <= 1:
        return "top_p must be above 0 and at most 1"
    if not 0 <= sampling.min_p <= 1:
        return "min_p must be 0 to 1"
    if not (math.isfinite(sampling.presence_penalty) and math.isfinite(sampling.frequency_penalty)):
        return "presence_penalty and frequency_penalty must be finite"
    if not 0 < sampling.repetition_penalty < math.inf:
        return "repetition_penalty must be finite and positive"
    if sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    bias = sampling.logit_bias
    if bias and max(bias) >= vocab_size:
        return "logit_bias names a token outside the vocabulary"
    if bias and not all(map(math.isfinite, bias.values())):
        return "logit_bias must be finite"
    if sampling.top_logprobs > vocab_size:
        return f"top_logprobs must be at most {vocab_size}"
    if sampling.HasField("grammar"):
        if sampling.grammar.kind not in {kind.value for kind in GrammarKind}:
            return f"this worker does not know grammars of kind {sampling.grammar.kind}"
        if len(sampling.grammar.text) > MAX_BYTES:
            return f"a grammar has at most {MAX_BYTES} bytes"
    if sampling.HasField("thinking_budget") and sampling.thinking_budget.end_token >= vocab_size:
        return "thinking_budget names a token outside the vocabulary"
    return ""


def _sampling_from_wire(sampling: pb.Sampling, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        # Some checkpoints name an end token outside their embedding; it can't be sampled.
        stop_token_ids=frozenset([token for token in sampling.stop_token_ids if token < vocab_size]),
        grammar=_grammar_from_wire(sampling.grammar) if sampling.HasField("grammar") else None,
        thinking_budget=_budget_from_wire(sampling.thinking_budget) if sampling.HasField("thinking_budget") else None,
    )


def _grammar_from_wire(grammar: pb.Grammar) -> Grammar:
    return Grammar(GrammarKind(grammar.kind), grammar.text)


def _budget_from_wire(budget: pb.ThinkingBudget) -> ThinkingBudget:
    start = budget.start_token if budget.HasField("start_token") else None
    return ThinkingBudget(budget.tokens, budget.end_token, start)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)

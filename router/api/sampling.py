"""Sampling parameters: from a request's fields (`schemas.py`) and the model's defaults to the message for workers.

From there: `Sampling` in `proto/cpd.proto`, `worker/wire_format.py`, `SamplingParams` in `engine/types.py`,
`engine/execution/sampling/sampler.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from cpd.common.checkpoint_files import read_json
from cpd.common.errors import CheckpointError
from cpd.common.settings import SamplingDefaults
from cpd.grammar.grammar import Grammar
from cpd.rpc import cpd_pb2 as pb
from router.api.schemas import GenerateRequest
from router.errors import invalid

_MODEL_DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields whose defaults can come from a model's generation_config.json."""

_LEAST_TOP_P = 1e-6
"""Replaces top_p = 0: only the most likely token remains."""


def default_sampling(model_dir: Path, source: SamplingDefaults) -> dict[str, float]:
    """Returns the sampling fields whose defaults differ from OpenAI's.

    If `source` is "model", they come from the checkpoint's generation_config.json. As in vLLM and SGLang, `do_sample`
    is not read.

    Raises:
        CheckpointError: generation_config.json has a value that a request can't have.
    """
    if source == "openai":
        return {}
    file = model_dir / "generation_config.json"
    config = read_json(file)
    sampling = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    try:
        GenerateRequest.model_validate({"model": "", **sampling})
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        reason = f"{file}: {name} is {sampling[name]!r}: {wrong['msg']}"
        raise CheckpointError(f"{reason}; correct it, or start with --sampling-defaults openai") from None
    return sampling


def sampling_message(
    request: GenerateRequest,
    *,
    seed: int,
    max_tokens: int,
    vocab_size: int,
    eos_ids: Sequence[int],
    grammar: Grammar | None = None,
    thinking_budget: pb.ThinkingBudget | None = None,
) -> pb.Sampling:
    """Returns the request's sampling parameters as the protobuf message that workers get.

    Args:
        seed: The request's seed, or a random one.
        max_tokens: Upper bound on the tokens of an output.
        eos_ids: Tokens that end an output, unless the request ignores them.
        grammar: What the output must follow.
        thinking_budget: Limit on its reasoning.

    Raises:
        ApiError: `logit_bias` or `stop_token_ids` has a token id beyond the vocabulary.
    """
    bias = {int(token_id): value for token_id, value in request.logit_bias.items()}
    if bias and max(bias) >= vocab_size:
        message = f"'logit_bias' has token id {max(bias)}, but the model's vocabulary has {vocab_size}."
        raise invalid("logit_bias", message)
    stops = request.stop_token_ids
    if stops and max(stops) >= vocab_size:
        message = f"'stop_token_ids' has token id {max(stops)}, but the model's vocabulary has {vocab_size}."
        raise invalid("stop_token_ids", message)
    return pb.Sampling(
        temperature=request.temperature,
        top_p=max(request.top_p, _LEAST_TOP_P),
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias or None,
        seed=seed,
        top_logprobs=request.alternatives,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=(*stops, *(() if request.ignore_eos else eos_ids)),
        grammar=None
        if grammar is None
        else pb.Grammar(kind=pb.Grammar.Kind.ValueType(grammar.kind.value), text=grammar.text),
        thinking_budget=thinking_budget,
    )

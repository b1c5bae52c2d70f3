"""The fields of the API's requests, and their valid values.

A field is honoured, or accepted and ignored because it can't change the result, or refused by name. A field that would
change the result is never ignored. `router/api/sampling.py` names the files that a sampling parameter passes through.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError

from router.api.chat_messages import (
    ChosenTool,
    Message,
    Tool,
    ToolChoice,
    Tools,
    check_messages,
    check_tools,
    text_or_list,
)
from router.api.parse import explained, load, parse_body, taken, validated
from router.api.strict_model import Body, StrictModel
from router.api.structured import ResponseFormat, Schema, StructuredOutputs
from router.errors import invalid

MAX_STOPS = 32
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_PROMPTS = 128
MAX_TEMPLATE_KWARGS = 32

MAX_SEED = (1 << 63) - 1
MAX_PRIORITY = 100

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_PASSING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are refused, with the values that have no effect and are accepted; some of them only where an
endpoint does not honour them."""

_VERBATIM = frozenset({"parameters", "response_format", "structured_outputs", "guided_json"})


def _form(value: Any) -> str:
    """The form of `prompt`. pydantic puts this name into the paths of its errors."""
    if not isinstance(value, list):
        return "<text>"
    if value and isinstance(value[0], list):
        return "<token lists>"
    return "<tokens>" if value and isinstance(value[0], int) else "<list>"


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the token counts of the call in the last chunk.")
    continuous_usage_stats: bool = Field(
        False, description="Extension, as in vLLM: with `include_usage`, every chunk tells the counts so far."
    )
    include_obfuscation: bool = Field(False, description="Accepted and ignored: no padding is ever sent.")


class GenerateRequest(Body):
    """The fields that both endpoints share."""

    HARMLESS: ClassVar[frozenset[str]] = _HARMLESS
    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = _PASSING
    VERBATIM: ClassVar[frozenset[str]] = _VERBATIM

    model: str = Field(description="Name of the model.")
    n: Count = Field(1, description="Number of choices to generate for each prompt.")
    stream: bool = Field(False, description="Send the response as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Options of a stream. Only valid with `stream`.")
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = Field(
        None, description="Seed of sampling: the same request with the same seed gets the same tokens."
    )
    stop: Annotated[
        Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("<list>")],
        Discriminator(text_or_list),
    ] = Field(default_factory=list, description="Strings that end an output. They are not part of it.")
    include_stop_str_in_output: bool = Field(
        False, description="Extension, as in vLLM: the string or token that ends an output is part of it."
    )
    stop_token_ids: Tokens = Field(
        default_factory=list,
        max_length=MAX_STOP_TOKENS,
        description="Extension, as in vLLM: tokens that end an output, besides the model's own.",
    )
    max_tokens: Count | None = Field(None, description="Limit on the tokens of an output.")
    temperature: Temperature = Field(1.0, description="Randomness of sampling; 0 always takes the likeliest token.")
    top_p: Probability = Field(1.0, description="Sample from the likeliest tokens with this total probability.")
    presence_penalty: Penalty = Field(0.0, description="Subtracted from the logits of tokens in the output so far.")
    frequency_penalty: Penalty = Field(
        0.0, description="Subtracted from the logits of tokens for each time they are in the output so far."
    )
    logit_bias: dict[str, Bias] = Field(
        default_factory=dict,
        max_length=MAX_LOGIT_BIAS,
        description=f"Added to logits, by token id; up to {MAX_LOGIT_BIAS} entries.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    top_k: int = Field(
        0, ge=-1, lt=1 << 31, description="Extension: sample from this many likeliest tokens; 0 or -1 means all."
    )
    min_p: Probability = Field(
        0.0, description="Extension: sample from tokens at least this probable, relative to the likeliest one."
    )
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, allow_inf_nan=False, description="Extension: repetition penalty, as in transformers."
    )
    min_tokens: int = Field(0, ge=0, lt=1 << 31, description="Extension: minimum number of tokens of an output.")
    ignore_eos: bool = Field(False, description="Extension: end-of-sequence tokens do not end an output.")
    return_token_ids: bool = Field(False, description="Extension: return the token ids of prompts and outputs.")
    response_format: ResponseFormat | None = Field(None, description="Constrains the output to JSON.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Extension, as in vLLM: constrains the output by a JSON schema, regex, choices or grammar."
    )
    guided_json: Schema | None = Field(
        None, description="Extension, as in vLLM: JSON schema, or its text, that the output follows."
    )
    guided_regex: str | None = Field(
        None, description="Extension, as in vLLM: regular expression that matches the whole output."
    )
    guided_choice: list[str] | None = Field(
        None, description="Extension, as in vLLM: the texts that the output may be."
    )
    guided_grammar: str | None = Field(
        None, description="Extension, as in vLLM: grammar of the output, in the notation of Lark or GBNF."
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None,
        description="Extension, as in vLLM: lower values are scheduled first. The default is 0, or the lowest that the "
        "API key allows, if that is more.",
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options.continuous_usage_stats  # type: ignore[union-attr]

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities for each token; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Limit on the output tokens; None for all that fit in the context."""
        raise NotImplementedError


def _template_kwargs() -> Any:
    """The field `chat_template_kwargs`."""
    return Field(
        default_factory=dict,
        max_length=MAX_TEMPLATE_KWARGS,
        description=f"Extension, as in vLLM: up to {MAX_TEMPLATE_KWARGS} additional variables for the chat template.",
        json_schema_extra={"additionalProperties": {"type": ["boolean", "number", "string"]}},
    )


class ChatRequest(GenerateRequest):
    """The body of `POST /v1/chat/completions`, and what other APIs for chats are translated to."""

    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_PASSING, "add_special_tokens": (False,)}

    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The chat so far.")
    tools: Tools = Field(
        default_factory=list, description="Tools that the model may call, if its template knows tools."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto` (the default): the model may call tools. `none`: the prompt has no tools. `required`: the "
        "output is tool calls. An object: the output is one call of this tool.",
    )
    parallel_tool_calls: bool = Field(True, description="If false, only the first call of an output is returned.")
    reasoning_effort: Effort | None = Field(
        None, description="How much the model thinks, if its chat template knows it; `none`: not at all."
    )
    thinking_token_budget: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Extension, as in vLLM: limit on the tokens of the reasoning. Not every model supports it."
    )
    chat_template_kwargs: dict[str, Any] = _template_kwargs()
    max_completion_tokens: Count | None = Field(None, description="As `max_tokens`; takes precedence over it.")
    logprobs: bool = Field(False, description="Return log-probabilities of the output's tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Number of likeliest tokens to return for each position. Only valid with `logprobs`."
    )

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the model sees and may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def chosen_tool(self) -> str | None:
        """Name of the tool that the output must be a call of; None if there is no such tool."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None

    @property
    def forces_calls(self) -> bool:
        """True if the output must be tool calls."""
        return self.tool_choice == "required" or self.chosen_tool is not None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerateRequest):
    """The body of `POST /v1/completions`."""

    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_PASSING, "add_special_tokens": (True,)}

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<list>")]
        | Annotated[Tokens, Tag("<tokens>")]
        | Annotated[
            list[Annotated[Tokens, Field(min_length=1)]],
            Field(max_length=MAX_PROMPTS, fail_fast=True),
            Tag("<token lists>"),
        ],
        Discriminator(_form),
    ] = Field(description="Text or token ids, or a list of either. Each of several prompts gets `n` choices.")
    max_tokens: Count | None = Field(16, description="Limit on the tokens of an output.")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        None, description="Return log-probabilities of the output's tokens, and of this many likeliest ones."
    )

    echo: bool = Field(False, description="Outputs begin with their prompt. Not with `logprobs`.")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, even if there is only one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt


class TokenizeRequest(Body):
    """The body of `POST /tokenize`."""

    VERBATIM: ClassVar[frozenset[str]] = frozenset({"parameters"})

    model: str | None = Field(None, description="Name of the model; may be left out.")
    prompt: str | None = Field(None, description="Text, as of `/v1/completions`. Either this or `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="A chat, as of `/v1/chat/completions`."
    )
    tools: Tools = Field(default_factory=list, description="With `messages`: tools that the model may call.")
    chat_template_kwargs: dict[str, Any] = _template_kwargs()
    add_special_tokens: bool = Field(
        True, description="With `prompt`: add the tokens that the tokenizer puts around a text, such as BOS."
    )
    add_generation_prompt: Literal[True] = Field(True, description="A chat ends where the model's answer begins.")
    return_token_strs: bool = Field(False, description="Return the text of each token.")


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = Field(None, description="Name of the model; may be left out.")
    tokens: Tokens = Field(description="Token ids.")


R = TypeVar("R", bound=GenerateRequest)
C = TypeVar("C", TokenizeRequest, DetokenizeRequest)


def no_defaults(model: object) -> Mapping[str, float]:
    """Returns no defaults that differ from OpenAI's, whatever the model."""
    return {}


def parse(
    body: bytes, kind: type[R], *, max_n: int, defaults: Callable[[object], Mapping[str, float]] = no_defaults
) -> R:
    """Parses and checks a request.

    Args:
        max_n: Largest valid `n`.
        defaults: Returns the defaults of sampling fields that differ from OpenAI's, for what the body has as `model`.

    Raises:
        ApiError: The request is not valid; the error names the field.
    """
    fields = load(body)
    request = validated(body, taken(fields, kind), kind, defaults(fields.get("model")))
    _check(request, max_n)
    return request


def chat_request(fields: Mapping[str, Any], defaults: Mapping[str, float]) -> ChatRequest:
    """Returns the chat that a request of another API is translated to, with one choice.

    Args:
        fields: Its fields.
        defaults: Defaults of sampling fields that differ from OpenAI's.

    Raises:
        ApiError: The chat is not valid; the error names the field of the chat.
    """
    try:
        request = ChatRequest.model_validate({**defaults, **fields})
    except ValidationError as error:
        raise explained(error) from None
    _check(request, 1)
    return request


def parse_conversion(body: bytes, kind: type[C]) -> C:
    """Parses and checks a request to convert between text and tokens.

    Raises:
        ApiError: The request is not valid; the error names the field.
    """
    request = parse_body(body, kind)
    if isinstance(request, TokenizeRequest):
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "Give either 'prompt' or 'messages'.", code="missing_required_parameter")
        _check_template_kwargs(request.chat_template_kwargs)
        check_messages(request.messages or ())
        check_tools(request.tools, None)
    return request


def _check(request: GenerateRequest, max_n: int) -> None:
    """Checks conditions on several fields, or on the server's settings."""
    if request.n > max_n:
        raise invalid("n", f"'n' must be at most {max_n}.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if request.output_limit is not None and request.min_tokens > request.output_limit:
        raise invalid("min_tokens", f"'min_tokens' must be at most 'max_tokens' ({request.output_limit}).")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise invalid("echo", "'echo' is not allowed with 'logprobs': prompts have no log-probabilities.")
    if isinstance(request, ChatRequest):
        _check_template_kwargs(request.chat_template_kwargs)
        check_messages(request.messages)
        check_tools(request.tools, request.tool_choice)
    for key in request.logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"'logit_bias' must be keyed by token ids, but has {key[:20]!r}.")


def _check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if not isinstance(value, bool | int | float | str):
            path = f"chat_template_kwargs.{name[:40]}"
            raise invalid(path, f"'{path}' must be a boolean, a number or a string.", code="invalid_type")

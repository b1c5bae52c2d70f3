"""The fields of the API's requests, and their valid values.

A field is honoured, or accepted and ignored because it can't change the result, or refused by name. A field that would
change the result is never ignored. `router/api/sampling.py` names the files that a sampling parameter passes through.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

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
from router.api.strict_model import StrictModel, allow_nulls
from router.api.structured import VERBATIM, ResponseFormat, Schema, StructuredOutputs
from router.errors import ApiError, invalid, unsupported

MAX_STOPS = 4
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_PROMPTS = 128
MAX_PARTS = 1 << 14
"""Limit on the messages of a chat plus the parts of their contents; that many take a tenth of a second."""

MAX_DEPTH = 256
"""Limit on the levels of lists and objects in a body, which is the first level. Recursive functions walk a body, and
Python allows 1,000 nested calls."""

MAX_COMPLAINTS = 1_000
"""A request with more errors than this is refused without naming the first one."""

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


def _form(value: Any) -> str:
    """The form of `prompt`. pydantic puts this name into the paths of its errors."""
    if not isinstance(value, list):
        return "<text>"
    if value and isinstance(value[0], list):
        return "<token lists>"
    return "<tokens>" if value and isinstance(value[0], int) else "<list>"


_FORMS = frozenset({"<text>", "<list>", "<object>", "<tokens>", "<token lists>"})


def _allow_ignored(schema: dict[str, Any]) -> None:
    """Adds the fields that `parse` accepts without honouring them to a JSON schema."""
    allow_nulls(schema)
    for name in sorted(_HARMLESS - schema["properties"].keys()):
        schema["properties"][name] = {"description": "Accepted and ignored: it can't change the result."}
    for name, passing in _UNSUPPORTED.items():
        if name in schema["properties"]:
            continue
        values = {"enum": [*passing, None]} if name != "best_of" else {"type": ["integer", "null"]}  # may also be n
        schema["properties"][name] = values | {
            "description": "Not supported: only values that have no effect are accepted."
        }


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the token counts of the call in the last chunk.")
    continuous_usage_stats: bool = Field(
        False, description="Extension, as in vLLM: with `include_usage`, every chunk tells the counts so far."
    )
    include_obfuscation: bool = Field(False, description="Accepted and ignored: no padding is ever sent.")


class GenerateRequest(StrictModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(json_schema_extra=_allow_ignored)

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
    temperature: float = Field(
        1.0, ge=0, le=2, allow_inf_nan=False, description="Randomness of sampling; 0 always takes the likeliest token."
    )
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
    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Extension, as in vLLM: lower values are scheduled first."
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
    """The body of `POST /v1/chat/completions`."""

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="How much the model thinks, if its chat template knows it; `none`: not at all."
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


class TokenizeRequest(StrictModel):
    """The body of `POST /tokenize`."""

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


class DetokenizeRequest(StrictModel):
    """The body of `POST /detokenize`."""

    model: str | None = Field(None, description="Name of the model; may be left out.")
    tokens: Tokens = Field(description="Token ids.")


R = TypeVar("R", bound=GenerateRequest)
C = TypeVar("C", TokenizeRequest, DetokenizeRequest)
M = TypeVar("M", bound=StrictModel)

_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "reasoning_effort": (),
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

_NOT_HONOURED = _HARMLESS | _UNSUPPORTED.keys()


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
    data = _load(body)
    if not _NOT_HONOURED.isdisjoint(data):
        _take_out(data, kind)
    request = _validate(body, data, kind, defaults(data.get("model")))
    _check(request, max_n)
    return request


def parse_conversion(body: bytes, kind: type[C]) -> C:
    """Parses and checks a request to convert between text and tokens.

    Raises:
        ApiError: The request is not valid; the error names the field.
    """
    request = _validate(body, _load(body), kind)
    if isinstance(request, TokenizeRequest):
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "Give either 'prompt' or 'messages'.", code="missing_required_parameter")
        _check_template_kwargs(request.chat_template_kwargs)
        check_messages(request.messages or ())
        check_tools(request.tools, None)
    return request


def _load(body: bytes) -> dict[str, Any]:
    """Returns the body's fields."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("depth limit"):  # orjson's own is 1,024
            raise _too_deep() from None
        raise invalid(None, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", code="invalid_type")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # with fewer it can't be too deep
        _check_depth(data)
    return data


def _validate(
    body: bytes, data: dict[str, Any], kind: type[M], defaults: Mapping[str, float] = MappingProxyType({})
) -> M:
    """Checks the fields of a body one by one."""
    _check_parts(data.get("messages"))
    if b"\\u0000" in body and (path := _find_nul(data)) is not None:
        raise invalid(path, f"'{path}' contains a NUL character, which is not allowed in text.")
    fields = data
    if b"null" in body:
        verbatim = {name: data[name] for name in VERBATIM if data.get(name) is not None}
        fields = _drop_nulls({name: value for name, value in data.items() if name not in VERBATIM}) | verbatim
    try:
        return kind.model_validate({**defaults, **fields})
    except ValidationError as error:
        raise _explain(error) from None


def _check_depth(data: dict[str, Any]) -> None:
    """Raises ApiError if lists and objects are nested deeper than MAX_DEPTH."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        items = (value.values() if type(value) is dict else value for value in level)
        level = [item for each in items for item in each if type(item) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(None, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")


def _take_out(fields: dict[str, Any], kind: type[GenerateRequest]) -> None:
    """Removes the fields that are not honoured; raises ApiError if an unsupported one would have an effect."""
    honoured = kind.model_fields.keys()
    for name in (_UNSUPPORTED.keys() & fields.keys()) - honoured:
        value = fields.pop(name)
        if not any(_same(value, passing) for passing in (None, *_passing(name, fields))):
            raise unsupported(name)
    for name in (_HARMLESS & fields.keys()) - honoured:
        del fields[name]


def _passing(name: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    # with best_of = n there is no choice among the outputs
    return (fields.get("n") or 1,) if name == "best_of" else _UNSUPPORTED[name]


def _same(value: Any, passing: Any) -> bool:
    return type(value) is type(passing) and value == passing  # in Python, 0 equals False


def _check_parts(messages: Any) -> None:
    """Raises ApiError if there are too many messages and parts."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        if len(messages) + sum(len(parts) for parts in contents if isinstance(parts, list)) > MAX_PARTS:
            raise invalid("messages", f"'messages' must be at most {MAX_PARTS} messages and parts of their contents.")


def _check(request: GenerateRequest, max_n: int) -> None:
    """Checks conditions on several fields, or on the server's settings."""
    if request.n > max_n:
        raise invalid("n", f"'n' must be at most {max_n}.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
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


def _drop_nulls(value: Any) -> Any:
    """Removes fields that are null, at any depth. Chat templates expect that, too. The schemas of tools keep theirs."""
    if isinstance(value, dict):
        return {
            key: item if key == "parameters" else _drop_nulls(item) for key, item in value.items() if item is not None
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_drop_nulls(item) for item in value]
    return value


def _find_nul(value: Any, path: str = "") -> str | None:
    """Returns the path of the first string with a NUL character in `value`."""
    if isinstance(value, str):
        return path if "\0" in value else None
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return next((found for name, item in items if (found := _find_nul(item, name)) is not None), None)


def _explain(error: ValidationError) -> ApiError:
    """Converts the first of pydantic's errors to OpenAI's format."""
    if error.error_count() > MAX_COMPLAINTS:  # to list them takes seconds
        return invalid(None, f"The body has {error.error_count()} errors.")
    first = error.errors(include_url=False)[0]
    *outer, last = first["loc"]
    # the last part can be any name that the client sent; the others are fields or forms
    path = [part for part in outer if part not in _FORMS]
    if last not in _FORMS or first["type"] == "extra_forbidden":
        path.append(last)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    match first["type"]:
        case "missing":
            return invalid(param, f"Missing required parameter: '{param}'.", code="missing_required_parameter")
        case "extra_forbidden":
            return invalid(param, f"Unrecognized request argument supplied: {param}", code="unknown_parameter")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return invalid(param, f"Invalid value for '{param}': {first['msg']}.", code=code)

"""The requests of the API: their fields, and which values are valid.

A field is honoured, or harmless (accepted and ignored, because it can't change the result), or refused by name. No
field that would change the result is ever ignored.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from router.errors import ApiError, invalid, unsupported

MAX_STOPS = 4
MAX_STOP_CHARS = 1_024
MAX_LOGIT_BIAS = 300
MAX_PROMPTS = 128
MAX_PARTS = 1 << 14
"""Most messages of a chat and parts of their contents together: a tenth of a second's work."""

MAX_DEPTH = 256
"""Levels of lists and objects in a body, which is the first. It may be walked by functions that call themselves: Python
ends at 1,000 calls."""

MAX_COMPLAINTS = 1_000
"""A request that is wrong in more places is refused without naming the first of them."""

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
    """The form in which `prompt` was sent; pydantic has the form's name in the paths of its errors."""
    if not isinstance(value, list):
        return "<text>"
    if value and isinstance(value[0], list):
        return "<token lists>"
    return "<tokens>" if value and isinstance(value[0], int) else "<list>"


def _text_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


_FORMS = frozenset({"<text>", "<list>", "<tokens>", "<token lists>"})


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Adds to a JSON schema that any field may be null, also an unknown one: `parse` drops it."""
    schema["additionalProperties"] = {"type": "null"}
    for name in schema["properties"].keys() - schema.get("required", ()):
        field = schema["properties"][name]
        if {"type": "null"} not in field.get("anyOf", ()):
            outer = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = outer | {"anyOf": [field, {"type": "null"}]}


def _allow_ignored(schema: dict[str, Any]) -> None:
    """Adds to a JSON schema the fields that `parse` accepts without honouring them."""
    _allow_nulls(schema)
    for name in sorted(_HARMLESS):
        schema["properties"][name] = {"description": "Accepted and ignored: it can't change the result."}
    for name, passing in _UNSUPPORTED.items():
        values = {"enum": [*passing, None]} if name != "best_of" else {"type": ["integer", "null"]}  # may also be n
        schema["properties"][name] = values | {"description": "Not supported: only what asks for nothing is accepted."}


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=_allow_nulls)


class StreamOptions(_Model):
    """`stream_options`."""

    include_usage: bool = Field(False, description="The last chunk has the call's token counts.")
    include_obfuscation: bool = Field(False, description="Accepted and ignored: no padding is ever sent.")


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields whose defaults a model's generation_config.json may set."""


class GenerateRequest(_Model):
    """Fields of both endpoints."""

    model_config = ConfigDict(json_schema_extra=_allow_ignored)

    model: str
    n: Count = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[
        Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("<list>")],
        Discriminator(_text_or_list),
    ] = Field(default_factory=list)
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Probability = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MAX_LOGIT_BIAS)
    top_k: int = Field(0, ge=-1, lt=1 << 31, description="Extension: samples from this many tokens; 0 or -1: from all.")
    min_p: Probability = Field(0.0, description="Extension: least probability of a token, relative to the likeliest.")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, allow_inf_nan=False, description="Extension: transformers' repetition penalty."
    )
    min_tokens: int = Field(0, ge=0, lt=1 << 31, description="Extension: nothing ends an output before.")
    ignore_eos: bool = Field(False, description="Extension: end-of-sequence tokens don't end an output.")
    return_token_ids: bool = Field(False, description="Extension: responses have the token ids of prompt and output.")
    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Extension, as in vLLM: lower values are scheduled first."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def alternatives(self) -> int | None:
        """Number of log-probabilities beside the chosen token's; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None for all that fit in the context."""
        raise NotImplementedError


class TextPart(_Model):
    """A content part. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<list>")],
        Discriminator(_text_or_list),
    ]
    name: str | None = None


class ChatRequest(GenerateRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, max_length=MAX_TEMPLATE_KWARGS, description="Extension: more variables for the template."
    )
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerateRequest):
    """`POST /v1/completions`. A prompt is text or token ids; each of several prompts gets `n` choices."""

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
    ]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

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


R = TypeVar("R", bound=GenerateRequest)

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
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are refused, each with the values that ask for nothing and are accepted."""

_NOT_HONOURED = _HARMLESS | _UNSUPPORTED.keys()


def parse(body: bytes, kind: type[R], *, max_n: int, defaults: Mapping[str, float] = MappingProxyType({})) -> R:
    """The request in `body`.

    Args:
        max_n: Largest valid `n`.
        defaults: Defaults of `SAMPLING` fields that differ from OpenAI's.

    Raises:
        ApiError: The request is not valid; the error names the field.
    """
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
    if not _NOT_HONOURED.isdisjoint(data):
        _take_out(data)
    _check_parts(data.get("messages"))
    if b"\\u0000" in body and (path := _find_nul(data)) is not None:
        raise invalid(path, f"'{path}' contains a NUL character, which is not allowed in text.")
    fields = _drop_nulls(data) if b"null" in body else data
    try:
        request = kind.model_validate({**defaults, **fields})
    except ValidationError as error:
        raise _explain(error) from None
    _check(request, max_n)
    return request


def _check_depth(data: dict[str, Any]) -> None:
    """Raises ApiError where lists and objects are nested deeper than MAX_DEPTH."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        items = (value.values() if type(value) is dict else value for value in level)
        level = [item for each in items for item in each if type(item) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(None, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")


def _take_out(fields: dict[str, Any]) -> None:
    """Removes the fields that are not honoured; raises ApiError if an unsupported one asks for something."""
    for name in _UNSUPPORTED.keys() & fields.keys():
        value = fields.pop(name)
        if not any(value is passing or value == passing for passing in (None, *_passing(name, fields))):
            raise unsupported(name)
    for name in _HARMLESS & fields.keys():
        del fields[name]


def _passing(name: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    # best_of = n asks for no choice among the outputs
    return (fields.get("n") or 1,) if name == "best_of" else _UNSUPPORTED[name]


def _check_parts(messages: Any) -> None:
    """Raises ApiError if there are too many messages and parts."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        if len(messages) + sum(len(parts) for parts in contents if isinstance(parts, list)) > MAX_PARTS:
            raise invalid("messages", f"'messages' must be at most {MAX_PARTS} messages and parts of their contents.")


def _check(request: GenerateRequest, max_n: int) -> None:
    """Checks what depends on several fields, or on the server's settings."""
    if request.n > max_n:
        raise invalid("n", f"'n' must be at most {max_n}.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if request.output_limit is not None and request.min_tokens > request.output_limit:
        raise invalid("min_tokens", f"'min_tokens' must be at most 'max_tokens' ({request.output_limit}).")
    if isinstance(request, ChatRequest):
        for name, value in request.chat_template_kwargs.items():
            if not isinstance(value, bool | int | float | str):
                path = f"chat_template_kwargs.{name[:40]}"
                raise invalid(path, f"'{path}' must be a boolean, a number or a string.", code="invalid_type")
    for key in request.logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"'logit_bias' must be keyed by token ids, but has {key[:20]!r}.")


def _drop_nulls(value: Any) -> Any:
    """Leaves out fields that are null, at any depth; chat templates expect that too."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_drop_nulls(item) for item in value]
    return value


def _find_nul(value: Any, path: str = "") -> str | None:
    """The path of the first string with a NUL character in `value`."""
    if isinstance(value, str):
        return path if "\0" in value else None
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return next((found for name, item in items if (found := _find_nul(item, name)) is not None), None)


def _explain(error: ValidationError) -> ApiError:
    """The first of pydantic's errors, in OpenAI's words."""
    if error.error_count() > MAX_COMPLAINTS:  # listing them takes seconds
        return invalid(None, f"The body is wrong in {error.error_count()} places.")
    first = error.errors(include_url=False)[0]
    *outer, last = first["loc"]
    # the last part may be any name that the client sent; the others are fields or forms
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

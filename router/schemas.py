"""The requests that clients send: which fields there are, and which values are valid.

A field is either honoured, or harmless (accepted and ignored, because it can't change the result), or refused by name.
Nothing that would change the result is ever ignored.
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
"""Messages of a chat, and parts of their contents: a tenth of a second's work."""

MAX_COMPLAINTS = 1_000
"""A request that is wrong in more places is refused without looking for the first one."""

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
    """Which form of a field that has several was sent; pydantic puts the name into its complaints' paths."""
    if not isinstance(value, list):
        return "<text>"
    if value and isinstance(value[0], list):
        return "<token lists>"
    return "<tokens>" if value and isinstance(value[0], int) else "<list>"


def _text_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


_FORMS = frozenset({"<text>", "<list>", "<tokens>", "<token lists>"})


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Model):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: never sent, which is allowed


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that a model has defaults of its own for."""


class GenerateRequest(_Model):
    """What both endpoints share. The last eight fields are extensions to OpenAI's API."""

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
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0  # as in vLLM: lower ones go first

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
        """Log-probabilities wanted beside the chosen token's; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None for as many as the context has room for."""
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
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=MAX_TEMPLATE_KWARGS)
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
    """`POST /v1/completions`. A prompt is text or token ids; several of them give several choices each."""

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
        """The prompts as a list, also where there is only one."""
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
"""Known fields that are refused, with the values that ask for nothing and pass."""

_NOT_HONOURED = _HARMLESS | _UNSUPPORTED.keys()


def parse(body: bytes, kind: type[R], *, max_n: int, defaults: Mapping[str, float] = MappingProxyType({})) -> R:
    """The request in `body`, valid in itself.

    Args:
        defaults: Of `SAMPLING`, where they are others than OpenAI's.

    Raises:
        ApiError: It is no valid request; the error names the field.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", code="invalid_type")
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


def _take_out(fields: dict[str, Any]) -> None:
    """Takes out what is not honoured; raises ApiError where it asks for something."""
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
    """Raises ApiError where there are too many."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        if len(messages) + sum(len(parts) for parts in contents if isinstance(parts, list)) > MAX_PARTS:
            raise invalid("messages", f"'messages' must be at most {MAX_PARTS} messages and parts of their contents.")


def _check(request: GenerateRequest, max_n: int) -> None:
    """What must hold between fields, or depends on the server's settings."""
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
    """A field that is null is a field left out, at any depth (chat templates too expect it so)."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_drop_nulls(item) for item in value]
    return value


def _find_nul(value: Any, path: str = "") -> str | None:
    """Where in `value` a string with a NUL character is."""
    if isinstance(value, str):
        return path if "\0" in value else None
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return next((found for name, item in items if (found := _find_nul(item, name)) is not None), None)


def _explain(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints, in OpenAI's words."""
    if error.error_count() > MAX_COMPLAINTS:  # writing them down takes seconds
        return invalid(None, f"The body is wrong in {error.error_count()} places.")
    first = error.errors(include_url=False)[0]
    *outer, last = first["loc"]
    # the last part may be whatever the client called it; others are fields or forms
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

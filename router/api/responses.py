"""Types of the API's responses.

mypy checks the code that builds the responses against them, and `/openapi.json` is generated from them.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from router.dispatch.output import FinishReason
from router.placement.worker_load import Residency

ApiFinishReason = FinishReason | Literal["tool_calls"]
"""Why a chat choice ended: `tool_calls` if it called tools and ended by itself."""


class PromptTokensDetails(TypedDict):
    """`cached_tokens` counts the prompt tokens that came from a cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of a call. The end-of-sequence token counts as an output token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Completion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenLogprob(TypedDict):
    """A token with its log-probability, before temperature, penalties and filters."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    """A token of the output, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat choice."""

    content: list[ScoredToken]
    refusal: None


class ChatCalledFunction(TypedDict):
    """A function with the text of its arguments, a JSON object."""

    name: str
    arguments: str


class ChatToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ChatCalledFunction


class ChatMessage(TypedDict):
    """The model's message. `reasoning` is the same as `reasoning_content`. With one of them or calls, `content` may be
    null."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class _ChatChoice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason | None
    token_ids: NotRequired[list[int]]


class ChatChoice(_ChatChoice):
    """One of the `n` choices. `token_ids` is there with `return_token_ids`."""

    message: ChatMessage


class ChatCompletion(_Completion):
    """The response of `POST /v1/chat/completions` in one piece."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class CalledFunctionDelta(TypedDict):
    """The name of a called function, or a piece of its arguments."""

    name: NotRequired[str]
    arguments: str


class ChatToolCallDelta(TypedDict):
    """The start of a call, with its id and type, or a piece of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(TypedDict):
    """New text of a choice. The first chunk has the role; the last one is empty."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCallDelta]]


class ChatChunkChoice(_ChatChoice):
    """A choice in a chunk."""

    delta: ChatDelta


class ChatCompletionChunk(_Completion):
    """An event of a chat stream.

    With `stream_options.include_usage`, `usage` is null before the last event; with `continuous_usage_stats` it is what
    was used so far.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """Log-probabilities of a text choice. Each list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    """A choice, or its part of a chunk. The token ids are there with `return_token_ids`."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextCompletion(_Completion):
    """The response of `POST /v1/completions` in one piece."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextCompletionChunk(_Completion):
    """An event of a text stream. `usage` is as in a chat stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    """A model. `max_model_len` is the context length in tokens; it is null before a worker is connected.

    `state`: `serving`, or it sleeps and requests wait: `asleep`, `waking`, or `draining` for another model. Of several
    workers the best one counts. Null: no worker takes requests.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    state: Residency | None


class ModelList(TypedDict):
    """A list of models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """The tokens of a prompt.

    `max_model_len` is as in the model's description; `token_strs` is null unless asked for.
    """

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of tokens."""

    prompt: str


class Version(TypedDict):
    """The version of this server."""

    version: str


class Draining(TypedDict):
    """The drain has begun."""

    status: Literal["draining"]


class ToldWorkers(TypedDict):
    """The workers that were told; the cluster's state shows what becomes of it."""

    told: list[str]


class Scaled(TypedDict):
    """The change has begun."""

    status: Literal["changing"]


class Health(TypedDict):
    """The check succeeded."""

    status: Literal["ok"]

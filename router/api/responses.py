"""The API's response documents, as types.

mypy checks the code that builds the documents against them, and `/openapi.json` is made from them.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from router.dispatch.output import FinishReason


class PromptTokensDetails(TypedDict):
    """`cached_tokens` counts the prompt tokens that were not computed, because a cache had them."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a call. The end-of-sequence token counts as an output token."""

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
    """A token of the output, with the most likely tokens at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat choice."""

    content: list[ScoredToken]
    refusal: None


class ChatMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class _ChatChoice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatChoice(_ChatChoice):
    """One of the `n` answers. `return_token_ids` brings the token ids."""

    message: ChatMessage


class ChatCompletion(_Completion):
    """The response of `POST /v1/chat/completions` in one piece."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    """New text of a choice; the first chunk has the role, the last one nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(_ChatChoice):
    """A choice's part of a chunk."""

    delta: ChatDelta


class ChatCompletionChunk(_Completion):
    """An event of a chat's stream. Only `stream_options.include_usage` brings `usage`, null up to the last chunk."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """Log-probabilities of a text choice; each list has one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    """A choice, or its part of a chunk. `return_token_ids` brings the token ids."""

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
    """An event of a text's stream. Only `stream_options.include_usage` brings `usage`, null up to the last chunk."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    """A model. `max_model_len` is unknown until a worker is there."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """The router is well."""

    status: Literal["ok"]

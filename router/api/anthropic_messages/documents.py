"""Types of what the Messages API sends: the message, its blocks, the events of a stream, and errors."""

from typing import Any, Literal

from typing_extensions import TypedDict


class TextContent(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    """What the model thought before its answer. The signature is always empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    """A call of a tool. If the output was cut, `input` has what came of it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokensDetails(TypedDict):
    """`thinking_tokens` counts the tokens with text of their own, up to the end of the reasoning."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Token counts of a call. The prompt has `input_tokens` and, from a cache, `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageDocument(TypedDict):
    """The model's message. `stop_reason` is null while it is written."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int


class MessageStartEvent(TypedDict):
    """The message begins, without content."""

    type: Literal["message_start"]
    message: MessageDocument


class ContentBlockStartEvent(TypedDict):
    """A block begins, without its text or input."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    """New text of the answer."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """New text of the reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(TypedDict):
    """A piece of the JSON text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDeltaEvent(TypedDict):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStopEvent(TypedDict):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDeltaEvent(TypedDict):
    """The message has ended; `usage` is that of the whole call."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(TypedDict):
    """The end of a stream."""

    type: Literal["message_stop"]


EVENTS = (
    *(MessageStartEvent, ContentBlockStartEvent, ContentBlockDeltaEvent, ContentBlockStopEvent),
    *(MessageDeltaEvent, MessageStopEvent),
)
"""The types of a stream's events."""


ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]


class MessagesErrorDetail(TypedDict):
    """An error; the message names the field that is wrong."""

    type: ErrorType
    message: str


class MessagesErrorResponse(TypedDict):
    """The body of every error response, and the last event of a stream that fails."""

    type: Literal["error"]
    error: MessagesErrorDetail

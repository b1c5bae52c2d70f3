"""Types of what the Responses API sends: the response, its items, and the events of a stream."""

from typing import Any, Literal

from typing_extensions import TypedDict

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(TypedDict):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """The model's answer."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """What the model thought before its answer."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(TypedDict):
    """A call of a function, with the text of its arguments, a JSON object."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(TypedDict):
    """`cached_tokens` counts the prompt tokens that came from a cache."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(TypedDict):
    """`reasoning_tokens` counts the tokens with text of their own, up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of a call. The end-of-sequence token counts as an output token."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    """The request's `reasoning`."""

    effort: str | None
    summary: str | None


class ResponseText(TypedDict):
    """The request's `text`."""

    format: dict[str, Any]


class ResponseDocument(TypedDict):
    """A response. `usage` is null while it is in progress."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class DeletedResponse(TypedDict):
    """A response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _Event(TypedDict):
    sequence_number: int


class ResponseEvent(_Event):
    """The response begins, or has ended."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseDocument


class _ItemEvent(_Event):
    output_index: int


class OutputItemEvent(_ItemEvent):
    """An item begins, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class ItemPlace(_ItemEvent):
    """Where in a response an event belongs."""

    item_id: str


class ContentPartEvent(ItemPlace):
    """The only part of a message or of reasoning begins, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: OutputText | ReasoningText


class TextDeltaEvent(ItemPlace):
    """New text of an answer."""

    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[Any]


class TextDoneEvent(ItemPlace):
    """All text of an answer."""

    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[Any]


class ReasoningDeltaEvent(ItemPlace):
    """New text of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningDoneEvent(ItemPlace):
    """All text of reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDeltaEvent(ItemPlace):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(ItemPlace):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


EVENTS = (
    *(ResponseEvent, OutputItemEvent, ContentPartEvent, TextDeltaEvent, TextDoneEvent),
    *(ReasoningDeltaEvent, ReasoningDoneEvent, ArgumentsDeltaEvent, ArgumentsDoneEvent),
)
"""The types of a stream's events."""

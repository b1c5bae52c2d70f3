"""The fields of `POST /v1/messages` and `/v1/messages/count_tokens`, and their valid values."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from router.api.chat_messages import MAX_TOOLS, ToolName, text_or_list
from router.api.schemas import MAX_STOPS, Count, Probability, Stop, Temperature
from router.api.strict_model import OTHER, Body, Refused, StrictModel, by_type

CacheControl = Annotated[dict[str, Any] | None, Field(description="Accepted and ignored: prompts are always cached.")]


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"] = Field(description="Kind of the block.")
    text: str = Field(description="The text.")
    cache_control: CacheControl = None
    citations: list[Any] = Field(default_factory=list, max_length=0, description="Citations are not supported.")


class ThinkingBlock(StrictModel):
    """What the model thought before its answer."""

    type: Literal["thinking"] = Field(description="Kind of the block.")
    thinking: str = Field(description="The reasoning.")
    signature: str = Field("", description="Accepted and ignored: reasoning is not signed here.")


class DirectCaller(StrictModel):
    """What made a call: the model itself, and no other tool."""

    type: Literal["direct"] = Field(description="Kind of the caller.")


class ToolUseBlock(StrictModel):
    """A call that the model made."""

    type: Literal["tool_use"] = Field(description="Kind of the block.")
    id: str = Field(min_length=1, max_length=256, description="Id of the call, to which its result refers.")
    name: str = Field(min_length=1, max_length=256, description="Name of the tool.")
    input: dict[str, Any] = Field(description="Arguments of the call.")
    cache_control: CacheControl = None
    caller: DirectCaller | None = Field(None, description="Accepted and ignored: the model makes all calls.")


Text = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("<text>")] | Annotated[Any, Refused("blocks"), Tag(OTHER)], by_type("text")
            ]
        ],
        Field(fail_fast=True),
        Tag("<list>"),
    ],
    Discriminator(text_or_list),
]
"""A text, or text blocks."""


class ToolResultBlock(StrictModel):
    """The result of a call."""

    type: Literal["tool_result"] = Field(description="Kind of the block.")
    tool_use_id: str = Field(min_length=1, max_length=256, description="Id of an earlier call.")
    content: Text = Field("", description="Text, or text blocks.")
    is_error: bool = Field(False, description="The call failed: the model sees the content behind `Error: `.")
    cache_control: CacheControl = None


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[Any, Refused("blocks"), Tag(OTHER)],
    by_type("text", "thinking", "tool_use", "tool_result"),
]


class MessageParam(StrictModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="Author of the message.")
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Block], Field(fail_fast=True), Tag("<list>")],
        Discriminator(text_or_list),
    ] = Field(
        description="Text, or blocks: `thinking` and `tool_use` in messages of the assistant, `tool_result` in the "
        "user's."
    )


class CustomTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] = Field("custom", description="Kind of the tool.")
    name: ToolName = Field(description="Name: up to 128 letters, digits, `_` and `-`.")
    description: str | None = Field(None, description="What it does, for the model.")
    input_schema: dict[str, Any] = Field(description="JSON schema of its arguments, of type object.")
    strict: bool | None = Field(
        None,
        description="If true, arguments follow `input_schema`. Unless calls are forced, not every model supports it.",
    )
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = Field(None, description="Accepted and ignored: arguments come as written.")
    defer_loading: bool | None = Field(None, description="Accepted and ignored: the model sees all tools.")
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1, max_length=1)] | None = Field(
        None, description="Only the model calls tools."
    )
    input_examples: list[Any] = Field(default_factory=list, max_length=0, description="Examples are not supported.")


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[Any, Refused("tools"), Tag(OTHER)],
    by_type("custom", default="custom"),
]


class ToolChoice(StrictModel):
    """Which tools the model calls."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`auto` (the default): the model may call tools. `none`: the prompt has no tools. `any`: the "
        "output is tool calls. `tool`: it is one call of `name`."
    )
    name: str | None = Field(None, description="With the type `tool`: its name.")
    disable_parallel_tool_use: bool = Field(False, description="Only the first call of an output is returned.")


class Thinking(StrictModel):
    """Whether the model thinks before its answer, if its chat template has a switch for it."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="`adaptive` is the same as `enabled`.")
    budget_tokens: Count | None = Field(
        None, description="Limit on the tokens of the thinking. Not every model supports it."
    )
    display: Literal["summarized"] | None = Field(None, description="Reasoning is always returned, as it is.")


class OutputFormat(StrictModel):
    """The answer is JSON that follows a schema."""

    type: Literal["json_schema"] = Field(description="Kind of the format.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema.")


class OutputConfig(StrictModel):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much the model thinks, if its chat template knows it."
    )
    format: OutputFormat | None = Field(None, description="Constrains the answer to JSON.")


class CountTokensRequest(Body):
    """The body of `POST /v1/messages/count_tokens`: what makes the prompt."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"cache_control", "metadata", "service_tier"})
    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }
    VERBATIM: ClassVar[frozenset[str]] = frozenset({"input", "input_schema", "schema"})
    ENTRIES: ClassVar[tuple[str, ...]] = ("messages", "system")

    model: str = Field(description="Name of the model.")
    messages: list[MessageParam] = Field(min_length=1, fail_fast=True, description="The conversation so far.")
    system: Text | None = Field(None, description="System message before the conversation.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list, description="Tools that the model may call, if its template knows tools."
    )
    tool_choice: ToolChoice | None = Field(None, description="Which tools the model calls.")
    thinking: Thinking | None = Field(None, description="Whether the model thinks; by default as its template says.")
    output_config: OutputConfig | None = Field(None, description="How the answer is written.")


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Count = Field(description="Limit on the tokens of the output, thinking included.")
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list, description="Strings that end an output. They are not part of it."
    )
    stream: bool = Field(False, description="Send the response as server-sent events.")
    temperature: Temperature | None = Field(
        None, description="Randomness of sampling; 0 always takes the likeliest token."
    )
    top_p: Probability | None = Field(None, description="Sample from the likeliest tokens with this total probability.")
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Sample from this many likeliest tokens; 0 means all."
    )

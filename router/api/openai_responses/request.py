"""The fields of `POST /v1/responses`, and their valid values."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from router.api.chat_messages import MAX_TOOLS, ToolName, text_or_list
from router.api.openai_responses.items import AnyItem, Item, MessageItem
from router.api.schemas import Count, Effort, Probability, Temperature
from router.api.strict_model import OTHER, Body, Refused, StrictModel, by_type

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits on the entries of `metadata` and on their characters. They come back with the response."""


def _any_names(schema: dict[str, Any]) -> None:
    """Allows any names in the JSON schema of a mapping: those of nulls, which are dropped, have no limit."""
    del schema["propertyNames"]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="Kind of the tool.")
    name: ToolName = Field(description="Name: up to 128 letters, digits, `_` and `-`.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments, of type object.")
    strict: bool | None = Field(
        None,
        description="If true, arguments follow `parameters`; the default is false. Unless calls are forced, not every "
        "model supports it.",
    )


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[Any, Refused("tools"), Tag(OTHER)], by_type("function")
]


class ChosenFunctionTool(StrictModel):
    """The function that must be called."""

    type: Literal["function"] = Field(description="Kind of the tool.")
    name: str = Field(description="Name of one of the tools.")


def _choice_form(value: Any) -> str:
    """The form of `tool_choice`, for pydantic's errors."""
    if isinstance(value, str):
        return "<text>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<function>" if kind == "function" else OTHER


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[ChosenFunctionTool, Tag("<function>")]
    | Annotated[Any, Refused("tool choices"), Tag(OTHER)],
    Discriminator(_choice_form),
]


class PlainFormat(StrictModel):
    """Text without constraints, or any JSON object."""

    type: Literal["text", "json_object"] = Field(description="Kind of the format.")


class SchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"] = Field(description="Kind of the format.")
    name: str | None = Field(None, description="Accepted and ignored.")
    description: str | None = Field(None, description="Accepted and ignored.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(None, description="Accepted: the output always follows the schema.")


def _format_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<schema>" if kind == "json_schema" else "<plain>"


class TextConfig(StrictModel):
    """How the answer is written."""

    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
            Discriminator(_format_form),
        ]
        | None
    ) = Field(None, description="Constrains the answer to JSON.")
    verbosity: Literal["medium"] | None = Field(None, description="Only the default is supported.")


class ReasoningConfig(StrictModel):
    """How the model thinks."""

    effort: Effort | None = Field(
        None, description="How much the model thinks, if its chat template knows it; `none`: not at all."
    )
    summary: Literal["auto"] | None = Field(
        None, description="Reasoning is returned as it is, and never summarized, which `auto` allows."
    )


class ResponsesRequest(Body):
    """The body of `POST /v1/responses`."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {
            "access_programs",
            "client_metadata",
            "max_tool_calls",  # of built-in tools
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "user",
        }
    )
    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    VERBATIM: ClassVar[frozenset[str]] = frozenset({"parameters", "schema"})
    ENTRIES: ClassVar[tuple[str, ...]] = ("input", "instructions")

    model: str = Field(description="Name of the model.")
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<list>")],
        Discriminator(text_or_list),
    ] = Field(description="Text of the user, or the items of the conversation.")
    instructions: str | None = Field(None, description="System message before the conversation.")
    previous_response_id: str | None = Field(
        None, description="Continues the conversation of an earlier response, if the server stores responses."
    )
    store: bool | None = Field(
        None, description="Keep the response and its conversation; the default is true, if the server stores responses."
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list, description="Functions that the model may call, if its template knows tools."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto` (the default): the model may call tools. `none`: the prompt has no tools. `required`: the "
        "output is tool calls. An object: the output is one call of this function.",
    )
    parallel_tool_calls: bool = Field(True, description="If false, only the first call of an output is returned.")
    text: TextConfig | None = Field(None, description="How the answer is written.")
    reasoning: ReasoningConfig | None = Field(None, description="How the model thinks.")
    max_output_tokens: Count | None = Field(None, description="Limit on the tokens of the output, reasoning included.")
    temperature: Temperature | None = Field(
        None, description="Randomness of sampling; 0 always takes the likeliest token."
    )
    top_p: Probability | None = Field(None, description="Sample from the likeliest tokens with this total probability.")
    stream: bool = Field(False, description="Send the response as server-sent events.")
    include: list[Literal["reasoning.encrypted_content"]] = Field(
        default_factory=list,
        description="Accepted and ignored: reasoning is returned as it is, and may be sent back so.",
    )
    metadata: dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)], Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
    ] = Field(
        default_factory=dict,
        max_length=MAX_METADATA,
        description=f"Comes back with the response. Up to {MAX_METADATA} entries, with keys of {MAX_METADATA_KEY} and "
        f"values of {MAX_METADATA_VALUE} characters.",
        json_schema_extra=_any_names,
    )

    @property
    def items(self) -> Sequence[AnyItem]:
        """The items of `input`."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

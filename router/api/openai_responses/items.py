"""The items of a conversation in the Responses API, as clients send them.

What is ignored is not stored with a response either.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.api.chat_messages import PromptCaching, RefusalPart, text_or_list
from router.api.strict_model import OTHER, Refused, StrictModel, by_type

_IGNORED = "Accepted and ignored: clients take it over from a response."

Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, Field(description=_IGNORED, exclude=True)]
ItemId = Annotated[str | None, Field(description=_IGNORED, exclude=True)]
Ignored = Annotated[list[Any], Field(description=_IGNORED, exclude=True)]


class InputTextPart(StrictModel):
    """Text for the model."""

    type: Literal["input_text"] = Field(description="Kind of the part.")
    text: str = Field(description="The text.")
    prompt_cache_breakpoint: PromptCaching = None


class OutputTextPart(StrictModel):
    """Text that the model wrote."""

    type: Literal["output_text"] = Field(description="Kind of the part.")
    text: str = Field(description="The text.")
    annotations: Ignored = Field(default_factory=list)
    logprobs: Ignored = Field(default_factory=list)


Part = Annotated[
    Annotated[InputTextPart, Tag("<input_text>")]
    | Annotated[OutputTextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[Any, Refused("parts"), Tag(OTHER)],
    by_type("input_text", "output_text", "refusal"),
]

Text = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list),
]
"""A text, or its parts."""


class MessageItem(StrictModel):
    """A message."""

    type: Literal["message"] = Field("message", description="Kind of the item.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Author of the message.")
    content: Text = Field(description="Text, or a list of parts.")
    id: ItemId = None
    status: Status = None
    phase: str | None = Field(None, description=_IGNORED, exclude=True)


class FunctionCallItem(StrictModel):
    """A call that the model made."""

    type: Literal["function_call"] = Field(description="Kind of the item.")
    call_id: str = Field(min_length=1, max_length=256, description="Id of the call, to which its result refers.")
    name: str = Field(min_length=1, max_length=256, description="Name of the tool.")
    arguments: str = Field(description="Arguments: the text of a JSON object.")
    id: ItemId = None
    status: Status = None


class FunctionCallOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"] = Field(description="Kind of the item.")
    call_id: str = Field(min_length=1, max_length=256, description="Id of an earlier call.")
    output: Text = Field(description="Text, or a list of parts.")
    id: ItemId = None
    status: Status = None


class SummaryTextPart(StrictModel):
    """A summary of reasoning."""

    type: Literal["summary_text"] = Field(description="Kind of the part.")
    text: str = Field(description="The text.")


class ReasoningTextPart(StrictModel):
    """Reasoning."""

    type: Literal["reasoning_text"] = Field(description="Kind of the part.")
    text: str = Field(description="The text.")


class ReasoningItem(StrictModel):
    """What the model thought before its answer."""

    type: Literal["reasoning"] = Field(description="Kind of the item.")
    content: list[ReasoningTextPart] = Field(default_factory=list, description="The reasoning.")
    summary: list[SummaryTextPart] = Field(default_factory=list, description="Used if there is no `content`.")
    id: ItemId = None
    status: Status = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[Any, Refused("items"), Tag(OTHER)],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]

AnyItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

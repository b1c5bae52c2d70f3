"""The messages and tools of a chat: their fields, what is valid, and the form that chat templates take."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from router.api.call_arguments import read_arguments
from router.api.strict_model import StrictModel
from router.errors import ApiError, invalid

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 18
"""Limit on the tools of a request as JSON."""

_PLAIN_FIELDS = {"role", "content"}
"""Fields of a message that has no others to check."""

ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
"""Anthropic's limit; OpenAI's is half of it."""


def text_or_list(value: Any) -> str:
    """The form of a text, for pydantic's errors."""
    return "<list>" if isinstance(value, list) else "<text>"


PromptCaching = Annotated[
    dict[str, Any] | None, Field(description="Accepted and ignored: prompts are always cached.", exclude=True)
]


class TextPart(StrictModel):
    """A content part. Only text is supported."""

    type: Literal["text"] = Field(description="Kind of the part.")
    text: str = Field(description="The text of the part.")
    cache_control: PromptCaching = None
    prompt_cache_breakpoint: PromptCaching = None


class RefusalPart(StrictModel):
    """A content part with which another model refused. Chat templates get it as text."""

    type: Literal["refusal"] = Field(description="Kind of the part.")
    refusal: str = Field(description="The text of the part.")


def _part_form(value: Any) -> str:
    """The form of a content part, for pydantic's errors."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<refusal>" if kind == "refusal" else "<part>"


Part = Annotated[
    Annotated[TextPart, Tag("<part>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_form)
]


class CalledFunction(StrictModel):
    """The function of a tool call."""

    name: str = Field(min_length=1, max_length=256, description="Name of the tool.")
    arguments: str = Field(description="Arguments: the text of a JSON object.")


class ToolCall(StrictModel):
    """A call that the model made in an earlier message."""

    id: str = Field(min_length=1, max_length=256, description="Id of the call, to which its result refers.")
    type: Literal["function"] = Field("function", description="Kind of the tool.")
    function: CalledFunction = Field(description="What was called.")
    index: int | None = Field(None, description="Accepted and ignored: clients take it over from a stream.")


class Message(StrictModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Author of the message.")
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("<list>")],
            Discriminator(text_or_list),
        ]
        | None
    ) = Field(
        None,
        description="Text, or a list of text parts. Only an assistant that calls tools, reasons or refuses may have "
        "none.",
    )
    name: str | None = Field(None, description="Name of the author, for chat templates that use it.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Tools that the assistant called."
    )
    tool_call_id: str | None = Field(None, description="The call whose result this is, with the role `tool`.")
    reasoning_content: str | None = Field(
        None, description="Extension: what the assistant thought before its answer, for chat templates that use it."
    )
    reasoning: str | None = Field(None, description="Extension: the same as `reasoning_content`, by vLLM's new name.")
    refusal: str | None = Field(
        None, description="Text with which another model refused: the assistant's answer, or the end of it."
    )
    annotations: list[Any] | None = Field(
        None, description="Accepted and ignored: clients take it over from an answer.", exclude=True
    )
    type: Literal["text", "message"] | None = Field(
        None, description="Accepted and ignored: some clients send it.", exclude=True
    )


class Function(StrictModel):
    """A function that the model may call."""

    name: ToolName = Field(description="Name: up to 128 letters, digits, `_` and `-`.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments, of type object.")
    strict: bool | None = Field(
        None,
        description="If true, arguments follow `parameters`. Unless calls are forced, not every model supports it.",
    )


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"] = Field(description="Kind of the tool.")
    function: Function = Field(description="The function.")


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class ChosenFunction(StrictModel):
    """The function that must be called."""

    name: str = Field(description="Name of one of the tools.")


class ChosenTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"] = Field(description="Kind of the tool.")
    function: ChosenFunction = Field(description="The function.")


def _choice_form(value: Any) -> str:
    """The form of `tool_choice`, for pydantic's errors."""
    return "<text>" if isinstance(value, str) else "<object>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ChosenTool, Tag("<object>")],
    Discriminator(_choice_form),
]


def check_messages(messages: Sequence[Message]) -> None:
    """Checks the fields of messages that depend on each other.

    Raises:
        ApiError: A message lacks a field, or has one that its role can't have, or a result is of no earlier call.
    """
    calls: set[str] = set()
    for index, message in enumerate(messages):
        if message.model_fields_set == _PLAIN_FIELDS and message.role != "tool":
            continue  # nearly always
        path = f"messages[{index}]"
        is_assistant = message.role == "assistant"
        has_other = message.tool_calls or reasoning_of(message) or message.refusal
        if message.content is None and not (is_assistant and has_other):
            raise _missing(f"{path}.content")
        if not is_assistant and (name := _assistants_field(message)) is not None:
            raise invalid(f"{path}.{name}", f"'{path}.{name}' is only allowed with the role assistant.")
        if message.tool_calls is not None:
            calls.update(call.id for call in message.tool_calls)
            for position, call in enumerate(message.tool_calls):
                _arguments(call.function.arguments, f"{path}.tool_calls[{position}].function.arguments")
        if message.role == "tool":
            if message.tool_call_id is None:
                raise _missing(f"{path}.tool_call_id")
            if message.tool_call_id not in calls:
                name = f"{path}.tool_call_id"
                raise invalid(name, f"'{name}' is not the id of a tool call in an earlier message.")
        elif message.tool_call_id is not None:
            raise invalid(f"{path}.tool_call_id", f"'{path}.tool_call_id' is only allowed with the role tool.")


def _assistants_field(message: Message) -> str | None:
    """Returns the name of a field that only an assistant's message can have; None if the message has none."""
    values = {
        "tool_calls": message.tool_calls,
        "reasoning_content": reasoning_of(message),
        "refusal": message.refusal,
        "annotations": message.annotations,
    }
    return next((name for name, value in values.items() if value is not None), None)


def check_tools(tools: Sequence[Tool], tool_choice: str | ChosenTool | None) -> None:
    """Checks what a request says about tools.

    Raises:
        ApiError: The tools are too many, or ambiguous, or one can't be called; or the choice is none of them.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function"
        if tool.function.name in names:
            raise invalid(f"{path}.name", f"'{path}.name': there are several tools '{tool.function.name}'.")
        names.add(tool.function.name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid(f"{path}.parameters", f"'{path}.parameters' must be a JSON schema of type object.")
    if tools and len(orjson.dumps([tool.model_dump() for tool in tools])) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"'tools' must be at most {MAX_TOOLS_BYTES} bytes of JSON.")
    if isinstance(tool_choice, ChosenTool) and tool_choice.function.name not in names:
        path = "tool_choice.function.name"
        raise invalid(path, f"'{path}' must be the name of one of the 'tools'.")
    if tool_choice == "required" and not tools:
        raise invalid("tool_choice", "'tool_choice' can only be 'required' with 'tools'.")


def reasoning_of(message: Message) -> str | None:
    """What the assistant thought before this message."""
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def template_message(message: Message) -> dict[str, Any]:
    """Returns a message for a chat template: the arguments of calls are objects, as templates expect."""
    written = message.model_dump(exclude_none=True, exclude={"refusal"})
    if (content := _template_content(message)) is not None:
        written["content"] = content
    if message.role != "assistant":
        return written
    written.setdefault("content", "")
    if (reasoning := written.pop("reasoning", None)) is not None:
        written.setdefault("reasoning_content", reasoning)
    written.pop("tool_calls", None)
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, "messages"),
                },
            }
            for call in message.tool_calls
        ]
    return written


def _template_content(message: Message) -> str | list[dict[str, str]] | None:
    """Returns the content of a message for a chat template. Refusals are texts; that of a message comes last."""
    content, refusal = message.content, message.refusal
    if isinstance(content, list):
        texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]
    elif content and refusal:
        texts = [content]
    else:
        return refusal or content
    if refusal:
        texts.append(refusal)
    return [{"type": "text", "text": text} for text in texts]


def template_tool(tool: Tool) -> dict[str, Any]:
    """Returns a tool for a chat template. The fields have one order, whatever the client's: prompts are cached."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters  # with its own nulls
    return {"type": tool.type, "function": function}


def _arguments(text: str, path: str) -> dict[str, Any]:
    """Returns the arguments of a call. Models may have written no JSON; that is not the client's error."""
    arguments = read_arguments(text)
    if not isinstance(arguments, dict):
        raise invalid(path, f"'{path}' must be the text of a JSON object.")
    return arguments


def _missing(path: str) -> ApiError:
    return invalid(path, f"Missing required parameter: '{path}'.", code="missing_required_parameter")

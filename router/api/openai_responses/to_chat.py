"""From a request of the Responses API to a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.api.chat_messages import RefusalPart
from router.api.openai_responses.items import (
    AnyItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    Text,
)
from router.api.openai_responses.request import ChosenFunctionTool, ResponsesRequest, SchemaFormat
from router.api.schemas import chat_request
from router.api.translation import Messages, Translation, chat_content, function_tool, named

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}
"""The names of the chat's fields in the Responses API."""


def to_chat(request: ResponsesRequest, earlier: Sequence[AnyItem], defaults: Mapping[str, float]) -> Translation:
    """Translates a request.

    Args:
        earlier: The items of the conversation before it.
        defaults: Defaults of sampling fields that differ from OpenAI's.

    Raises:
        ApiError: The conversation or its tools are not valid.
    """
    messages = Messages()
    if request.instructions is not None:
        messages.add("instructions", "system", request.instructions)
    for item in earlier:
        _add(messages, "previous_response_id", item)
    for index, item in enumerate(request.items):
        _add(messages, f"input[{index}]" if isinstance(request.input, list) else "input", item)
    tools = {f"tools[{index}].function": f"tools[{index}]" for index in range(len(request.tools))}
    names = {**_NAMES, **tools, **messages.names}
    with named(names):
        return Translation(chat_request({**_fields(request), "messages": messages.messages}, defaults), names)


def _add(messages: Messages, path: str, item: AnyItem) -> None:
    match item:
        case MessageItem(role="assistant"):
            messages.add_answer(path, _content(item.content))
        case MessageItem():
            messages.add(path, item.role, _content(item.content))
        case ReasoningItem():
            texts = [part.text for part in item.content] or [part.text for part in item.summary]
            messages.add_reasoning(path, "\n".join(texts))
        case FunctionCallItem():
            messages.add_call(path, item.call_id, item.name, item.arguments, "arguments")
        case FunctionCallOutputItem():
            messages.add_result(path, item.call_id, "call_id", _content(item.output))


def _content(text: Text) -> str | list[dict[str, str]]:
    """Returns the content of a message of the chat."""
    if isinstance(text, str):
        return text
    return chat_content([part.refusal if isinstance(part, RefusalPart) else part.text for part in text])


def _fields(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of the chat but for its messages."""
    fields: dict[str, Any] = {
        "model": request.model,
        "stream": request.stream,
        "parallel_tool_calls": request.parallel_tool_calls,
        "tools": [function_tool(one.name, one.description, one.parameters, one.strict) for one in request.tools],
    }
    choice, form = request.tool_choice, request.text.format if request.text is not None else None
    if isinstance(choice, ChosenFunctionTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    if isinstance(form, SchemaFormat):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
    elif form is not None:
        fields["response_format"] = {"type": form.type}
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.temperature is not None:
        fields["temperature"] = request.temperature
    if request.top_p is not None:
        fields["top_p"] = request.top_p
    return fields

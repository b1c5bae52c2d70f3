"""From a request of the Messages API to a chat."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.api.anthropic_messages.request import (
    AnyBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.schemas import chat_request
from router.api.translation import Messages, Translation, chat_content, function_tool, named
from router.errors import ApiError, invalid

_NAMES: Mapping[str, str] = {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function": "tool_choice",
}
"""The names of the chat's fields in the Messages API."""


def to_chat(request: CountTokensRequest, defaults: Mapping[str, float]) -> Translation:
    """Translates a request.

    Args:
        defaults: Defaults of sampling fields that differ from OpenAI's.

    Raises:
        ApiError: The conversation or its tools are not valid.
    """
    messages = Messages()
    if request.system is not None:
        messages.add("system", "system", _text(request.system))
    for index, message in enumerate(request.messages):
        _add(messages, f"messages[{index}]", message)
    if request.messages[-1].role == "assistant":
        path = f"messages[{len(request.messages) - 1}].role"
        reason = f"'{path}' can't be 'assistant' in the last message: the model does not continue its own text."
        raise invalid(path, reason, code="unsupported_parameter")
    is_off = request.thinking is not None and request.thinking.type == "disabled"
    names = {**_NAMES, "reasoning_effort": "thinking" if is_off else "output_config.effort", **messages.names}
    for index in range(len(request.tools)):
        names[f"tools[{index}].function"] = f"tools[{index}]"
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    fields = {**_fields(request), "messages": messages.messages}
    if isinstance(request, MessagesRequest):
        fields |= _generation(request)
    with named(names):
        return Translation(chat_request(fields, defaults), names)


def _add(messages: Messages, path: str, message: MessageParam) -> None:
    if isinstance(message.content, str):
        if message.role == "assistant":
            messages.add_answer(path, message.content)
        else:
            messages.add(path, message.role, message.content)
        return
    blocks = [(f"{path}.content[{index}]", block) for index, block in enumerate(message.content)]
    if message.role == "assistant":
        _add_assistant(messages, path, blocks)
    else:
        _add_other(messages, path, message.role, blocks)


def _add_assistant(messages: Messages, path: str, blocks: Sequence[tuple[str, AnyBlock]]) -> None:
    """Adds a message of the assistant: thinking, then text, then calls, as chat templates write them."""
    texts: list[TextBlock] = []
    for name, block in blocks:
        match block:
            case ThinkingBlock():
                messages.add_reasoning(path, block.thinking)
            case TextBlock():
                texts.append(block)
            case ToolResultBlock():
                raise _wrong_role(name, block.type, "assistant")
    if texts or not blocks:
        messages.add_answer(path, _text(texts))
    for name, block in blocks:
        if isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False, separators=(",", ":"))  # orjson: only 64 bits
            messages.add_call(name, block.id, block.name, arguments, "input")


def _add_other(messages: Messages, path: str, role: str, blocks: Sequence[tuple[str, AnyBlock]]) -> None:
    """Adds a message of the user or the system. Results are messages of their own, text between them, too."""
    texts: list[TextBlock] = []
    for name, block in blocks:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock() if role == "user":
                if texts:
                    messages.add(path, role, _text(texts))
                    texts = []
                messages.add_result(name, block.tool_use_id, "tool_use_id", _result(block))
            case _:
                raise _wrong_role(name, block.type, role)
    if texts or not blocks:
        messages.add(path, role, _text(texts))


def _wrong_role(path: str, kind: str, role: str) -> ApiError:
    return invalid(path, f"'{path}' is of the type '{kind}', which the role {role} can't have.")


def _text(text: str | Sequence[TextBlock]) -> str | list[dict[str, str]]:
    """Returns the content of a message of the chat."""
    return text if isinstance(text, str) else chat_content([block.text for block in text])


def _result(block: ToolResultBlock) -> str | list[dict[str, str]]:
    content = _text(block.content)
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _fields(request: CountTokensRequest) -> dict[str, Any]:
    """Returns the fields of the chat that the prompt depends on, but for its messages."""
    fields: dict[str, Any] = {
        "model": request.model,
        "tools": [function_tool(one.name, one.description, one.input_schema, one.strict) for one in request.tools],
    }
    choice, config = request.tool_choice, request.output_config
    if choice is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            if choice.name is None:
                message = "Missing required parameter: 'tool_choice.name'."
                raise invalid("tool_choice.name", message, code="missing_required_parameter")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.json_schema}}
    if request.thinking is not None:
        if request.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        else:  # a model without a switch thinks always, or not at all
            fields["chat_template_kwargs"] = {"enable_thinking": True}
    return fields


def _generation(request: MessagesRequest) -> dict[str, Any]:
    """Returns the fields of the chat that only the output depends on."""
    fields: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
    }
    sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    if request.thinking is not None:
        sampling["thinking_token_budget"] = request.thinking.budget_tokens
    return fields | {name: value for name, value in sampling.items() if value is not None}

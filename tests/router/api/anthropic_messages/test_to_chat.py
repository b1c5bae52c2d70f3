"""What requests of the Messages API become, and the names in their errors."""

import json
from typing import Any

import orjson
import pytest

from router.api.anthropic_messages.parse import parse_messages
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest
from router.api.anthropic_messages.to_chat import to_chat
from router.api.chat_messages import template_message
from router.api.parse import MAX_PARTS
from router.api.schemas import ChatRequest
from router.errors import ApiError

HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"default": None}}}}
USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": None}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


def _chat(**fields: Any) -> ChatRequest:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode()
    return to_chat(parse_messages(body, MessagesRequest), {}).chat


def _messages(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in _chat(messages=list(messages), **fields).messages]


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def _turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def test_the_system_message_comes_first() -> None:
    assert _messages(HI, system="Be brief.") == [{"role": "system", "content": "Be brief."}, HI]
    blocks = [_text("Be brief.", cache_control={"type": "ephemeral"}), _text("Be kind.")]
    assert _messages(HI, system=blocks)[0]["content"] == [_text("Be brief."), _text("Be kind.")]


def test_blocks_of_the_system_message_are_limited_as_others_are() -> None:
    with pytest.raises(ApiError) as refusal:
        _chat(system=[_text("x")] * (MAX_PARTS + 1))
    assert refusal.value.param == "system"


def test_integers_of_any_size_in_an_input_stay_as_they_are() -> None:
    use = USE | {"input": {"wei": 1234567890123456789012345, "low": [-9999999999999999999, 1.5], "text": "é\n"}}
    schema = {"type": "object", "properties": {"a": {"maximum": 10**30}}}
    turn = _turn(use, role="assistant")
    (_, message, *_) = _chat(messages=[HI, turn, _turn(RESULT)], tools=[TOOL | {"input_schema": schema}]).messages
    assert template_message(message)["tool_calls"][0]["function"]["arguments"] == use["input"]


def test_blocks_of_a_turn_become_messages_of_a_chat() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = _messages(
        _turn(_text("How is it?")),
        _turn(thinking, _text("Let me look."), USE, USE | {"id": "t2", "input": {}}, role="assistant"),
        _turn(
            RESULT,
            RESULT | {"tool_use_id": "t2", "content": [_text("rainy")], "is_error": True},
            _text("Go on.", cache_control=None),
        ),
    )
    calls = [("t1", '{"a":null}'), ("t2", "{}")]
    assert messages == [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me look.",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "f", "arguments": text}} for name, text in calls
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: rainy"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_result_may_have_no_content() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    assert _messages(HI, _turn(USE, role="assistant"), _turn(result))[-1]["content"] == ""


def test_texts_may_have_nul_characters() -> None:
    used = _turn({"type": "thinking", "thinking": "a\0"}, USE | {"input": {"text": "d\0"}}, role="assistant")
    system, thought, result = _messages(used, _turn(RESULT | {"content": [_text("b\0")]}), system="c\0")
    assert (system["content"], thought["reasoning_content"], result["content"]) == ("c\0", "a\0", "b\0")
    assert thought["tool_calls"][0]["function"]["arguments"] == r'{"text":"d\u0000"}'


def test_a_message_of_the_system_may_be_anywhere() -> None:
    assert _messages(HI, {"role": "system", "content": "Now in German."}, HI)[1]["role"] == "system"


def test_the_other_fields_have_their_names_in_a_chat() -> None:
    chat = _chat(
        tools=[TOOL | {"description": "F", "strict": True}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "null"}}},
    )
    assert chat.tools[0].function.parameters == TOOL["input_schema"]
    assert chat.tools[0].function.strict
    assert (chat.chosen_tool, chat.parallel_tool_calls, chat.reasoning_effort) == ("f", False, "low")
    assert (chat.output_limit, chat.temperature, chat.top_p, chat.top_k, chat.stream) == (9, 0.5, 0.9, 7, True)
    assert chat.stops == ("x",)
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.json_schema == {"type": "null"}
    tools = {"tools": [TOOL]}
    assert _chat(**tools, tool_choice={"type": "any"}).tool_choice == "required"
    assert _chat(**tools, tool_choice={"type": "none"}).tool_choice == "none"
    assert _chat(**tools, tool_choice={"type": "auto"}).tool_choice == "auto"


def test_thinking_is_switched_by_the_templates_own_variables() -> None:
    enabled = _chat(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (enabled.chat_template_kwargs, enabled.thinking_token_budget) == ({"enable_thinking": True}, 1024)
    assert _chat(thinking={"type": "adaptive"}).chat_template_kwargs == {"enable_thinking": True}
    assert _chat(thinking={"type": "disabled"}).reasoning_effort == "none"
    assert _chat().chat_template_kwargs == {}


def test_fields_that_can_not_change_the_result_are_accepted() -> None:
    harmless: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "speed": "standard",
        "container": None,
    }
    assert _chat(**harmless) == _chat()
    of_tools = {"defer_loading": True, "allowed_callers": ["direct"], "input_examples": []}
    use = _turn(USE | {"caller": {"type": "direct"}}, role="assistant")
    asked = _chat(tools=[TOOL | of_tools], messages=[HI, use, _turn(RESULT)])
    assert asked == _chat(tools=[TOOL], messages=[HI, _turn(USE, role="assistant"), _turn(RESULT)])


def test_counting_takes_what_makes_the_prompt() -> None:
    body = {"model": "m", "messages": [HI], "system": "Be brief.", "tools": [TOOL], "tool_choice": {"type": "none"}}
    chat = to_chat(parse_messages(orjson.dumps(body), CountTokensRequest), {}).chat
    assert (len(chat.messages), chat.offered_tools, chat.output_limit) == (2, (), None)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [HI, _turn(_text("Y"), role="assistant")]}, "messages[1].role", "unsupported_parameter"),
        ({"messages": [_turn(RESULT)]}, "messages[0].content[0].tool_use_id", "invalid_value"),
        ({"messages": [_turn(_text("x"), USE)]}, "messages[0].content[1]", "invalid_value"),
        ({"messages": [_turn(RESULT, role="assistant"), HI]}, "messages[0].content[0]", "invalid_value"),
        ({"messages": [_turn(RESULT, role="system"), HI]}, "messages[0].content[0]", "invalid_value"),
        ({"messages": [_turn({"type": "image", "source": {}})]}, "messages[0].content[0]", "unsupported_parameter"),
        (
            {"messages": [HI, _turn({"type": "redacted_thinking", "data": "x"}, role="assistant"), HI]},
            "messages[1].content[0]",
            "unsupported_parameter",
        ),
        (
            {"messages": [HI, _turn(USE | {"input": "x"}, role="assistant"), HI]},
            "messages[1].content[0].input",
            "invalid_type",
        ),
        ({"messages": [_turn(USE | {"name": "a\0b"})]}, "messages[0].content[0].name", "invalid_value"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "invalid_value"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema", "invalid_value"),
        (
            {"tools": [TOOL | {"allowed_callers": ["direct", "code_execution_20250825"]}]},
            "tools[0].allowed_callers",
            "invalid_value",
        ),
        ({"tools": [TOOL | {"input_examples": [{"a": 1}]}]}, "tools[0].input_examples", "invalid_value"),
        (
            {"messages": [HI, _turn(USE | {"caller": {"type": "code_execution_20250825"}}, role="assistant"), HI]},
            "messages[1].content[0].caller.type",
            "invalid_value",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences", "invalid_value"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "invalid_value"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "invalid_value"),
        ({"container": "c"}, "container", "unsupported_parameter"),
        ({"speed": "fast"}, "speed", "unsupported_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"system": [{"type": "image"}]}, "system[0]", "unsupported_parameter"),
    ],
    ids=str,
)
def test_errors_name_the_clients_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        _chat(**fields)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, param, code)
    assert param in refusal.value.message

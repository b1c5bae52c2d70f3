"""What requests of the Responses API become, and the names in their errors."""

from typing import Any

import orjson
import pytest

from router.api.openai_responses.request import ResponsesRequest
from router.api.openai_responses.to_chat import to_chat
from router.api.parse import parse_body
from router.api.schemas import ChatRequest
from router.errors import ApiError

TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object", "default": None}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def _chat(**fields: Any) -> ChatRequest:
    request = parse_body(orjson.dumps({"model": "m", "input": "hi", **fields}), ResponsesRequest)
    return to_chat(request, (), {}).chat


def _messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in _chat(input=list(items), **fields).messages]


def _error(**fields: Any) -> tuple[str | None, str, str]:
    with pytest.raises(ApiError) as refusal:
        _chat(**fields)
    assert refusal.value.status == 400
    return refusal.value.param, refusal.value.code, refusal.value.message


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert [message.model_dump(exclude_unset=True) for message in _chat(instructions="Be brief.").messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    turn = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
        },
        CALL | {"id": "fc_1", "status": "completed"},
        CALL | {"call_id": "c2"},
        RESULT,
        RESULT | {"call_id": "c2", "output": [{"type": "input_text", "text": "rainy"}]},
        CALL | {"call_id": "c3"},
        {"role": "developer", "content": "Go on."},
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2", "c3")]
    assert _messages(*turn) == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Let me look.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rainy"},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "developer", "content": "Go on."},
    ]


def test_a_summary_stands_for_reasoning_that_is_not_there() -> None:
    summaries = [{"type": "summary_text", "text": text} for text in ("One.", "Two.")]
    answer = {"role": "assistant", "content": "Yes."}
    assert _messages({"type": "reasoning", "summary": summaries}, answer) == [
        {"role": "assistant", "reasoning_content": "One.\nTwo.", "content": "Yes."}
    ]
    assert _messages({"type": "reasoning", "id": "rs_1", "summary": []}, answer) == [answer]


def test_texts_may_have_nul_characters() -> None:
    assert _messages(CALL, RESULT | {"output": "a\0b"})[1]["content"] == "a\0b"
    assert [message.content for message in _chat(input="a\0b", instructions="c\0d").messages] == ["c\0d", "a\0b"]


def test_several_parts_stay_apart() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    (message,) = _messages({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_the_other_fields_have_their_names_in_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    chat = _chat(
        tools=[TOOL | {"description": "F", "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stream=True,
    )
    assert chat.tools[0].function.parameters == TOOL["parameters"]
    assert chat.tools[0].function.strict
    assert (chat.chosen_tool, chat.parallel_tool_calls, chat.reasoning_effort) == ("f", False, "low")
    assert (chat.output_limit, chat.temperature, chat.top_p, chat.stream) == (7, 0.5, 0.9, True)
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.json_schema == schema
    assert _chat(text={"format": {"type": "json_object"}}).response_format is not None


def test_what_is_left_out_has_the_models_defaults() -> None:
    request = parse_body(orjson.dumps({"model": "m", "input": "hi", "temperature": None}), ResponsesRequest)
    chat = to_chat(request, (), {"temperature": 0.6, "top_k": 20}).chat
    assert (chat.temperature, chat.top_k, chat.output_limit, chat.tool_choice) == (0.6, 20, None, None)


def test_what_is_ignored_is_not_kept_with_a_response() -> None:
    part: dict[str, Any] = {"type": "output_text", "text": "x", "annotations": [{"a": 1}], "logprobs": [2]}
    item: dict[str, Any] = {"type": "message", "role": "assistant", "content": [part]}
    body = {"model": "m", "input": [item | {"id": "msg_1", "status": "completed", "phase": "final_answer"}]}
    (kept,) = parse_body(orjson.dumps(body), ResponsesRequest).items
    assert kept.model_dump(exclude_unset=True) == item | {"content": [{"type": "output_text", "text": "x"}]}


def test_fields_that_can_not_change_the_result_are_accepted() -> None:
    harmless = {
        "service_tier": "auto",
        "user": "u",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "truncation": "disabled",
        "background": False,
        "top_logprobs": 0,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False, "reasoning_summary_delivery": "sequential"},
        "client_metadata": {"x-codex-installation-id": "i"},
        "access_programs": [],
        "text": {"verbosity": "medium"},
    }
    assert _chat(**harmless) == _chat()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "invalid_value"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1]", "unsupported_parameter"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "unsupported_parameter"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "invalid_value"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "unsupported_parameter"),
        ({"input": [{"type": 5}]}, "input[0]", "invalid_type"),
        ({"input": ["hi"]}, "input[0]", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        ({"input": [CALL | {"name": "a\0b"}]}, "input[0].name", "invalid_value"),
        ({"input": [RESULT]}, "input[0].call_id", "invalid_value"),
        ({"input": [CALL, CALL | {"call_id": "c2", "arguments": "[]"}]}, "input[1].arguments", "invalid_value"),
        ({"input": [CALL | {"encrypted_content": "x"}]}, "input[0].encrypted_content", "unknown_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
        ({"metadata": {"k" * 65: "x"}}, f"metadata.{'k' * 65}", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"model": None}, "model", "missing_required_parameter"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_clients_field(fields: dict[str, Any], param: str, code: str) -> None:
    found, found_code, message = _error(**fields)
    assert (found, found_code) == (param, code)
    assert param in message

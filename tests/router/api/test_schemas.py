from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from router.api.chat_messages import template_message, template_tool
from router.api.parse import MAX_PARTS
from router.api.schemas import ChatRequest, CompletionRequest, parse
from router.errors import ApiError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def _chat(**fields: Any) -> ChatRequest:
    return parse(orjson.dumps(CHAT | fields), ChatRequest, max_n=4)


def _text(**fields: Any) -> CompletionRequest:
    return parse(orjson.dumps(TEXT | fields), CompletionRequest, max_n=4)


def _error(body: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as refusal:
        parse(body, ChatRequest, max_n=4)
    assert refusal.value.status == 400
    error: dict[str, Any] = orjson.loads(refusal.value.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_the_defaults_are_openais() -> None:
    chat, text = _chat(), _text()
    assert (chat.temperature, chat.top_p, chat.n, chat.output_limit, chat.alternatives) == (1.0, 1.0, 1, None, None)
    assert (text.output_limit, text.stream, text.prompts) == (16, False, ["hi"])


def test_a_models_defaults_apply_to_missing_fields() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    body = orjson.dumps(CHAT | {"temperature": 0, "top_k": None})
    chat = parse(body, ChatRequest, max_n=4, defaults=lambda model: defaults if model == "m" else {})
    assert (chat.temperature, chat.top_k, chat.repetition_penalty, chat.top_p) == (0, 20, 1.05, 1.0)


def test_a_templates_variables_are_plain_values() -> None:
    asked = {"enable_thinking": False, "effort": "low", "n": 1, "share": 0.5}
    assert _chat(chat_template_kwargs=asked | {"nothing": None}).chat_template_kwargs == asked
    for wrong in ([1], {"a": 1}):
        error = _error(orjson.dumps(CHAT | {"chat_template_kwargs": {"documents": wrong}}))
        assert (error["param"], error["code"]) == ("chat_template_kwargs.documents", "invalid_type")
    many = {str(number): number for number in range(33)}
    assert _error(orjson.dumps(CHAT | {"chat_template_kwargs": many}))["param"] == "chat_template_kwargs"


def test_null_is_the_same_as_left_out() -> None:
    assert (
        _chat(**dict.fromkeys(("temperature", "stop", "n", "tools", "user", "logit_bias", "stream_options"))) == _chat()
    )
    assert _text(max_tokens=None).output_limit == 16
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert _chat(messages=[message]).messages[0].content == "x"


def test_fields_that_can_not_change_the_result_are_accepted() -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "30m"},
        "tools": [],
        "functions": [],
        "modalities": ["text"],
        "logprobs": False,
        "top_logprobs": 0,
    }
    assert _chat(**harmless).model_copy(update={"top_logprobs": None}) == _chat()
    assert _text(echo=False, suffix="", best_of=2, n=2) == _text(n=2)


def test_what_vllms_clients_send_and_asks_for_nothing_is_accepted() -> None:
    nothing = {
        "add_generation_prompt": True,
        "bad_words": [],
        "documents": [],
        "include_reasoning": True,
        "logits_processors": [],
        "mm_processor_kwargs": {},
        "return_tokens_as_token_ids": False,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
    }
    assert _chat(**nothing, add_special_tokens=False) == _chat()
    assert _text(**nothing, add_special_tokens=True) == _text()
    for kind, value in ((ChatRequest, True), (CompletionRequest, False)):
        body = (CHAT if kind is ChatRequest else TEXT) | {"add_special_tokens": value}
        with pytest.raises(ApiError, match="add_special_tokens"):
            parse(orjson.dumps(body), kind, max_n=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 3),
    ],
)
def test_fields_that_would_change_the_result_are_refused_by_name(field: str, value: Any) -> None:
    error = _error(orjson.dumps(CHAT | {field: value}))
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"foo": 1}, "foo", "unknown_parameter"),
        ({"foo[]": 1}, "foo[]", "unknown_parameter"),
        ({"str": 1}, "str", "unknown_parameter"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": 5}, "model", "invalid_type"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
            "missing_required_parameter",
        ),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1 << 40}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 5}, "n", "invalid_value"),
        ({"seed": 1 << 63}, "seed", "invalid_value"),
        ({"seed": 0.5}, "seed", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a"] * 33}, "stop", "invalid_value"),
        ({"stop": ["a", 3]}, "stop[1]", "invalid_type"),
        ({"stop": "x" * 2_000}, "stop", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        ({"logit_bias": {"one": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "name": "a\0b"}]}, "messages[0].name", "invalid_value"),
        ({"chat_template_kwargs": {"text": "a\0b"}}, "chat_template_kwargs.text", "invalid_value"),
        ({"stop": ["a", "\0"]}, "stop[1]", "invalid_value"),
        ({"model": "m\0"}, "model", "invalid_value"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    error = _error(orjson.dumps(CHAT | fields))
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"temperature": 1e999}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
    ],
    ids=repr,
)
def test_anything_but_a_json_object_is_refused(body: bytes, code: str) -> None:
    assert _error(body)["code"] == code


def test_a_huge_integer_is_refused_by_name() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + b"0" * 40 + b"}"
    assert _error(body)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several_of_them(prompt: Any, prompts: Any) -> None:
    assert _text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [-1], 7, {"a": 1}, [True], ["a"] * 200, [[1], ["a"]], [1 << 40]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as refusal:
        _text(prompt=prompt)
    assert orjson.loads(refusal.value.body())["error"]["param"].startswith("prompt")


def test_validation_of_a_list_ends_at_the_first_error() -> None:
    wrong = [True] * 1_000
    for prompt in (wrong, [wrong] * 100, [1, *wrong], ["a", *wrong[:100]]):
        with pytest.raises(ValidationError) as refusal:
            CompletionRequest.model_validate(TEXT | {"prompt": prompt})
        assert refusal.value.error_count() == 1
    part = {"type": "image", "text": "x"}
    for messages in (wrong, [{"role": "user", "content": [part] * 1_000}]):
        with pytest.raises(ValidationError) as refusal:
            ChatRequest.model_validate(CHAT | {"messages": messages})
        assert refusal.value.error_count() <= 2  # of one item


def test_a_body_with_very_many_errors_is_refused_with_their_number() -> None:
    unknown = dict.fromkeys(map(str, range(5_000)), 1)
    for fields in (unknown, {"logit_bias": dict.fromkeys(unknown, "x")}, {"messages": [CHAT["messages"][0] | unknown]}):
        assert "5000" in _error(orjson.dumps(CHAT | fields))["message"]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"role": "user", "content": "x"}] * (MAX_PARTS + 1), id="messages"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS // 2)}] * 2, id="parts"),
    ],
)
def test_a_chat_of_very_many_parts_is_refused(messages: list[Any]) -> None:
    error = _error(orjson.dumps(CHAT | {"messages": messages}))
    assert (error["param"], error["code"]) == ("messages", "invalid_value")


def test_there_may_be_32_stop_strings() -> None:
    stops = [f"{number}." for number in range(32)]
    assert _chat(stop=stops).stops == _text(stop=stops).stops == tuple(stops)


def test_completions_take_up_to_five_logprobs() -> None:
    assert _text(logprobs=5).alternatives == 5
    with pytest.raises(ApiError):
        _text(logprobs=6)


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "y"}]},
]


def _with_function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def _choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_calls_may_be_forced() -> None:
    for choice, forces, chosen in (("auto", False, None), ("required", True, None), (_choice("f"), True, "f")):
        request = _chat(tool_choice=choice, **_with_function(strict=True))
        assert (request.forces_calls, request.chosen_tool) == (forces, chosen)


def test_tools_and_calls_are_honoured() -> None:
    schema = {"type": "object", "properties": {"x": {"default": None, "enum": [1, None]}}}
    request = _chat(
        messages=CALLS,
        tool_choice="auto",
        parallel_tool_calls=False,
        **_with_function(parameters=schema, strict=False, description=None),
    )
    assert template_tool(request.tools[0]) == {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert template_message(request.messages[1]) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert template_message(request.messages[2])["tool_call_id"] == "a"
    assert request.offered_tools == request.tools
    assert _chat(tools=[TOOL], tool_choice="none").offered_tools == ()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": ["x\ny", "z', {"a": ["x\ny"]}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": 1, "b": True}', {}),
        ('{"a": 1234567890123456789012345}', {"a": 1234567890123456789012345}),
        ('{"a": [-9999999999999999999, 1.5]}', {"a": [-9999999999999999999, 1.5]}),
        (r'{"a": "\d+"}', {}),
        ('{"a": "x\ny", "b": "\\ud800"}', {}),
        ('{"a": ' + "[" * 5000, {}),
        ("no JSON", {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_call_may_come_back_as_the_model_wrote_it(text: str, arguments: dict[str, Any]) -> None:
    call = CALL | {"function": {"name": "f", "arguments": text}}
    written = template_message(_chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0])
    assert written["tool_calls"][0]["function"]["arguments"] == arguments


def test_reasoning_of_an_earlier_answer_may_come_back_under_either_name() -> None:
    for names in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        message = {"role": "assistant", "content": None, **dict.fromkeys(names, "I see.")}
        written = template_message(_chat(messages=[message]).messages[0])
        assert written == {"role": "assistant", "content": "", "reasoning_content": "I see."}


def test_texts_of_messages_may_have_nul_characters() -> None:
    part = {"type": "text", "text": "a\0"}
    chat = [CALLS[0] | {"content": [part]}, CALLS[1] | {"reasoning_content": "b\0"}, CALLS[2] | {"content": "c\0"}]
    user, assistant, tool = (template_message(message) for message in _chat(messages=chat).messages)
    assert (user["content"], assistant["reasoning_content"], tool["content"]) == ([part], "b\0", "c\0")


def test_arguments_of_calls_may_have_nul_characters() -> None:
    call = CALL | {"function": {"name": "f", "arguments": '{"a": "\\u0000"}'}}
    (asked,) = _chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert template_message(asked)["tool_calls"][0]["function"]["arguments"] == {"a": "\0"}


@pytest.mark.parametrize("kind", ["text", "message"])
def test_what_clients_send_with_messages_and_changes_nothing_is_left_out(kind: str) -> None:
    caching = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    part = {"type": "text", "text": "x"}
    plain: list[dict[str, Any]] = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "y"}]
    user = {"type": kind, "role": "user", "content": [part | caching]}
    assistant = plain[1] | {"type": kind, "annotations": [{"type": "url_citation"}]}
    assert [template_message(message) for message in _chat(messages=[user, assistant]).messages] == plain


@pytest.mark.parametrize(
    ("content", "refusal", "written"),
    [
        (None, "No.", "No."),
        ("", "No.", "No."),
        ("Well.", "", "Well."),
        ("Well.", "No.", [{"type": "text", "text": "Well."}, {"type": "text", "text": "No."}]),
        ([{"type": "refusal", "refusal": "No."}], None, [{"type": "text", "text": "No."}]),
        (
            [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}],
            "Sorry.",
            [{"type": "text", "text": text} for text in ("Well.", "No.", "Sorry.")],
        ),
    ],
)
def test_refusals_are_texts(content: Any, refusal: Any, written: Any) -> None:
    (message,) = _chat(messages=[{"role": "assistant", "content": content, "refusal": refusal}]).messages
    assert template_message(message) == {"role": "assistant", "content": written}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
        (_with_function(description="x" * (1 << 18)), "tools", "invalid_value"),
        (_with_function(name="a b"), "tools[0].function.name", "invalid_value"),
        (_with_function(name=""), "tools[0].function.name", "invalid_value"),
        (_with_function(name="f\n"), "tools[0].function.name", "invalid_value"),
        (_with_function(name="x" * 129), "tools[0].function.name", "invalid_value"),
        (_with_function(parameters=[]), "tools[0].function.parameters", "invalid_type"),
        (_with_function(parameters={"type": "array"}), "tools[0].function.parameters", "invalid_value"),
        (_with_function(other=1), "tools[0].function.other", "unknown_parameter"),
        (_with_function(strict="yes"), "tools[0].function.strict", "invalid_type"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tools": [TOOL], "tool_choice": _choice("g")}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
        ({"messages": [CALLS[0], CALLS[2]]}, "messages[1].tool_call_id", "invalid_value"),
        ({"messages": [CALLS[2], CALLS[1]]}, "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [CALLS[1] | {"role": "user", "content": "x"}]}, "messages[0].tool_calls", "invalid_value"),
        ({"messages": [CALLS[0] | {"tool_call_id": "a"}]}, "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [CALLS[0] | {"reasoning": "x"}]}, "messages[0].reasoning_content", "invalid_value"),
        ({"messages": [CALLS[0] | {"refusal": "x"}]}, "messages[0].refusal", "invalid_value"),
        ({"messages": [CALLS[0] | {"annotations": []}]}, "messages[0].annotations", "invalid_value"),
        ({"messages": [{"role": "assistant", "refusal": ""}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [CALLS[0] | {"type": "image"}]}, "messages[0].type", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x", "text": "x"}]}]},
            "messages[0].content[0].text",
            "unknown_parameter",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "missing_required_parameter"),
        *(
            (
                {
                    "messages": [
                        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": wrong}}]}
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
                code,
            )
            for wrong, code in (
                ("[1]", "invalid_value"),
                ({}, "invalid_type"),
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_tools_and_calls_are_named(fields: dict[str, Any], param: str, code: str) -> None:
    error = _error(orjson.dumps(CHAT | fields))
    assert (error["param"], error["code"]) == (param, code)


def test_completions_echo_their_prompt_but_not_with_logprobs() -> None:
    assert _text(echo=True).echo
    with pytest.raises(ApiError, match="'echo' is not allowed with 'logprobs'"):
        _text(echo=True, logprobs=0)

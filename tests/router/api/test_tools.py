"""Tools and reasoning, with the official client, a router on a socket and workers that answer known text."""

import json
from typing import Any, get_args

import openai
import pytest

from cpd.common.settings import ReasoningParserName, ToolCallParserName
from router.api.respond import INLINE_TOKENS
from router.text.parsers.output import TOOL_PARSERS
from router.text.parsers.reasoning import TAGS
from tests.router.api.conftest import ARGUMENTS, CALL, NOW, Start
from tests.router.api.tool_models import MODEL, QUESTION
from tests.router.conftest import Router

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]


async def _whole_and_streamed(router: Router, **asked: Any) -> tuple[Any, Any]:
    """The first choice of both responses; that of the stream as the client's own helper puts it together."""
    whole = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, **asked)
    extra: Any = asked.pop("extra_body", {}) | asked  # the helper itself only takes tools that are strict
    async with router.client.chat.completions.stream(model=MODEL, messages=QUESTION, extra_body=extra) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    return whole.choices[0], streamed.choices[0]


def _calls(choice: Any) -> list[tuple[str, str]]:
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        ("hermes-tools", CALL, None, [("get_weather", ARGUMENTS)]),
        ("hermes-tools", f"Let me look.\n{CALL}\n{NOW}", "Let me look.", [("get_weather", ARGUMENTS), ("now", "{}")]),
        (
            "llama3-tools",
            f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
            None,
            [("get_weather", ARGUMENTS)],
        ),
        (
            "mistral-tools",
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
            None,
            [("get_weather", ARGUMENTS)],
        ),
    ],
)
async def test_calls_are_parsed_in_the_format_of_the_models_template(
    start: Start, template: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    for choice in await _whole_and_streamed(await start(template, text), tools=TOOLS):
        assert (choice.message.content or None, _calls(choice), choice.finish_reason) == (content, calls, "tool_calls")


async def test_a_stream_has_openais_chunks(start: Start) -> None:
    router = await start("hermes-tools", f"Hm.\n{CALL}")
    stream = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, stream=True)
    choices = [chunk.model_dump(exclude_unset=True)["choices"][0] async for chunk in stream]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    content = [delta for delta in deltas[1:] if "content" in delta]
    assert "".join(delta["content"] for delta in content) == "Hm."
    first, *pieces = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    id = first[0].pop("id")
    assert id.startswith("call_")
    assert first == [{"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}]
    assert pieces
    assert all(
        [{"index": 0, "function": {"arguments": piece[0]["function"]["arguments"]}}] == piece for piece in pieces
    )
    assert "".join(piece[0]["function"]["arguments"] for piece in pieces) == ARGUMENTS
    assert deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_text_that_is_no_call_is_content_with_its_special_tokens(start: Start) -> None:
    text = "<tool_call>no</tool_call> yes"
    for choice in await _whole_and_streamed(await start("hermes-tools", text), tools=TOOLS):
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


async def test_a_call_that_is_cut_has_its_arguments_so_far(start: Start) -> None:
    router = await start("hermes-tools", CALL)
    whole = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=50)
    ((name, arguments),) = _calls(whole.choices[0])
    assert name == "get_weather"
    assert arguments == ARGUMENTS[: len(arguments)] != ARGUMENTS
    assert whole.choices[0].finish_reason == "length"


async def test_line_breaks_in_arguments_break_no_client(start: Start) -> None:
    router = await start("hermes-tools", CALL.replace(ARGUMENTS, '{"city": "New\n\tYork"}'))
    for choice in await _whole_and_streamed(router, tools=TOOLS):
        assert _calls(choice) == [("get_weather", '{"city": "New\\n\\tYork"}')]
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for streams in (False, True):
        body = {"model": MODEL, "input": "How is it?", "tools": tools, "stream": streams}
        answer = (await router.http.post("/v1/responses", json=body)).text
        assert r'"arguments":"{\"city\": \"New\\n\\tYork\"}"' in answer


async def test_a_long_output_is_parsed_beside_the_event_loop(start: Start) -> None:
    arguments = json.dumps({"days": list(range(500))})
    router = await start("hermes-tools", CALL.replace(ARGUMENTS, arguments))
    whole = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    assert whole.usage
    assert whole.usage.completion_tokens > INLINE_TOKENS
    assert _calls(whole.choices[0]) == [("get_weather", arguments)]


async def test_only_the_first_call_comes_back_without_parallel_calls(start: Start) -> None:
    router = await start("hermes-tools", f"{NOW}\n{CALL}")
    for choice in await _whole_and_streamed(router, tools=TOOLS, parallel_tool_calls=False):
        assert _calls(choice) == [("now", "{}")]


async def test_each_choice_has_its_own_calls(start: Start) -> None:
    router = await start("hermes-tools", CALL, "Fine.")
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "n": 2}
    whole = await router.client.chat.completions.create(**asked)
    assert [_calls(choice) for choice in whole.choices] == [[("get_weather", ARGUMENTS)], []]
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    streamed = {0: "", 1: ""}
    async for chunk in await router.client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            streamed[choice.index] += call.function.arguments
    assert streamed == {0: ARGUMENTS, 1: "Fine."}


@pytest.mark.parametrize("arguments", [r'{"city": "\d+"}', '{"city": True}'])
async def test_a_call_that_is_no_json_can_go_back(start: Start, arguments: str) -> None:
    router = await start("hermes-tools", CALL.replace(ARGUMENTS, arguments))
    answer = (
        (await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)).choices[0].message
    )
    assert answer.tool_calls
    result: Any = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "no JSON"}
    messages: Any = [*QUESTION, answer.model_dump(exclude_none=True), result]
    assert (await router.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)).choices


async def test_results_go_back_into_the_prompt(start: Start) -> None:
    router = await start("hermes-tools", CALL)
    answer = (
        (await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)).choices[0].message
    )
    assert answer.tool_calls
    messages = [
        *QUESTION,
        answer.model_dump(),
        {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"},
    ]
    found = (await router.http.post("/tokenize", json={"messages": messages, "tools": TOOLS})).raise_for_status().json()
    text = (await router.http.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"]
    assert '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert '{"type": "function", "function": {"name": "now", "description": "The time"}}' in text
    assert (await router.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)).choices


async def test_without_tools_nothing_is_parsed_and_the_prompt_has_none(start: Start) -> None:
    router = await start("hermes-tools", "[now] {}", reasoning_parser="none")
    variants: list[Any] = [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}]
    for asked in variants:
        answer = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, **asked)
        plain = await router.client.chat.completions.create(model=MODEL, messages=QUESTION)
        assert answer.choices[0].message.content == "[now] {}"
        assert answer.usage
        assert plain.usage
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        ("chatml", {}, "This model's chat template has no tools."),
        ("{{ tools }}", {}, "How this model calls tools is not known; the operator can set --tool-call-parser."),
        ("hermes-tools", {"tool_call_parser": "none"}, "How this model calls tools is not known"),
    ],
)
async def test_a_model_that_knows_no_tools_refuses_them(
    start: Start, template: str, settings: dict[str, Any], message: str
) -> None:
    router = await start(template, "x", **settings)
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        await router.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    assert (refusal.value.param, refusal.value.code) == ("tools", "unsupported_parameter")


async def test_the_operator_can_choose_the_parser(start: Start) -> None:
    router = await start("{{ tools }}", "[now()]", tool_call_parser="pythonic")
    for choice in await _whole_and_streamed(router, tools=TOOLS):
        assert _calls(choice) == [("now", "{}")]


class TestReasoning:
    async def test_it_is_separated_from_the_answer(self, start: Start) -> None:
        router = await start("hermes-tools", "<think>\nI see: 你好\n</think>\n\nYes.")
        for choice in await _whole_and_streamed(router):
            assert choice.message.content == "Yes."
            assert choice.message.reasoning_content == choice.message.reasoning == "I see: 你好"
            assert choice.finish_reason == "stop"

    async def test_it_may_begin_in_the_prompt(self, start: Start) -> None:
        router = await start("hermes-tools", "I see.</think>Yes.")
        for extra in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
            for choice in await _whole_and_streamed(router, extra_body=extra):
                assert (choice.message.content, choice.message.reasoning) == ("Yes.", "I see.")
        (whole, _) = await _whole_and_streamed(router, extra_body={"reasoning_effort": "none"})
        assert whole.message.content == "I see.</think>Yes."

    async def test_calls_come_behind_it(self, start: Start) -> None:
        router = await start("hermes-tools", f"<think>{NOW}</think>\n\n{CALL}")
        for choice in await _whole_and_streamed(router, tools=TOOLS):
            assert choice.message.reasoning_content == NOW
            assert _calls(choice) == [("get_weather", ARGUMENTS)]
            assert not choice.message.content

    async def test_an_output_that_is_cut_within_it_has_no_content(self, start: Start) -> None:
        router = await start("hermes-tools", "<think>the quick brown fox jumps over the lazy dog</think>Yes.")
        answer = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3)
        choice: Any = answer.choices[0]
        assert choice.message.content is None
        assert choice.message.reasoning.startswith("the")
        assert choice.finish_reason == "length"

    async def test_the_effort_is_refused_by_a_template_that_does_not_know_it(self, start: Start) -> None:
        router = await start("chatml", "x")
        with pytest.raises(openai.BadRequestError) as refusal:
            await router.client.chat.completions.create(model=MODEL, messages=QUESTION, reasoning_effort="low")
        assert (refusal.value.param, refusal.value.code) == ("reasoning_effort", "unsupported_parameter")

    async def test_the_effort_is_a_variable_of_a_template_that_reads_it(self, start: Start) -> None:
        router = await start("{{ reasoning_effort }}", "x")
        body = {"model": MODEL, "messages": QUESTION, "reasoning_effort": "low", "return_token_ids": True}
        answer = (await router.http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        text = (await router.http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]})).json()["prompt"]
        assert text == "low"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_and_token_ids_of_all_tokens_are_there(start: Start, stream: bool) -> None:
    router = await start("hermes-tools", f"<think>Hm.</think>Well.\n{CALL}")
    body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = (await router.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    text = b"".join(bytes(one["bytes"]) for one in whole["logprobs"]["content"]).decode()
    assert text == f"<think>Hm.</think>Well.\n{CALL}"
    assert len(whole["token_ids"]) == len(whole["logprobs"]["content"]) + 1
    if not stream:
        return
    response = await router.http.post("/v1/chat/completions", json=body | {"stream": True})
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    choices = [event["choices"][0] for event in events]
    assert [id for choice in choices for id in choice.get("token_ids", [])] == whole["token_ids"]
    scored = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    assert scored == whole["logprobs"]["content"]


def test_the_settings_name_every_parser() -> None:
    assert set(get_args(ToolCallParserName)) == {"auto", "none", *TOOL_PARSERS}
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *TAGS}

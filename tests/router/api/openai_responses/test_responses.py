"""The Responses API with the official client, a router on a socket and workers that answer known text."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.router.api.conftest import ARGUMENTS, CALL, NOW, Start
from tests.router.api.tool_models import MODEL
from tests.router.conftest import Router

TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {}}},
        "strict": False,
    },
    {"type": "function", "name": "now", "description": "The time", "parameters": None, "strict": None},
]
THINKING = "<think>\nI see: 你好\n</think>\n\n"
JSON = '{"city": "Bern", "days": 3}'


class Trip(BaseModel):
    """An answer that the model gives as JSON."""

    city: str
    days: int


async def _events(router: Router, **asked: Any) -> list[Any]:
    stream = await router.client.responses.create(**{"model": MODEL, "input": "How is it?", "stream": True, **asked})
    return [event async for event in stream]


async def _both(router: Router, **asked: Any) -> list[Any]:
    """The response in one piece, and the last one of a stream, which also the client's own helper puts together."""
    asked = {"model": MODEL, "input": "How is it?", **asked}
    whole = await router.client.responses.create(**asked)
    events = await _events(router, **asked)
    async with router.client.responses.stream(**asked) as stream:
        helped = [event async for event in stream]
    assert _runs(helped) == _runs(events)
    last = events[-1].response
    assert _content(last) == _content(whole)
    assert last.usage == whole.usage
    return [whole, last]


def _runs(events: list[Any]) -> list[str]:
    """The types of events without repetitions: several tokens may come in one event."""
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kind != kinds[place - 1]]


def _content(response: Any) -> list[tuple[str, Any]]:
    """The kinds and texts of a response's items."""
    content: list[tuple[str, Any]] = []
    for item in response.output:
        if item.type == "function_call":
            content.append((item.type, (item.name, item.arguments)))
        else:
            content.append((item.type, "".join(part.text for part in item.content)))
    return content


async def test_a_text_is_the_output(start: Start) -> None:
    router = await start("hermes-tools", "the fox: 你好")
    for response in await _both(router, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50):
        assert response.output_text == "the fox: 你好"
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert (response.model, response.instructions, response.metadata) == (MODEL, "Be brief.", {"a": "b"})
        assert (response.max_output_tokens, response.temperature, response.tool_choice) == (50, 1.0, "auto")
        (message,) = response.output
        assert (message.role, message.status, message.content[0].annotations) == ("assistant", "completed", [])
        usage = response.usage
        assert usage.input_tokens + usage.output_tokens == usage.total_tokens
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (16, 0)


async def test_reasoning_and_calls_are_items(start: Start) -> None:
    router = await start("hermes-tools", f"{THINKING}Let me look.\n{CALL}\n{NOW}")
    for response in await _both(router, tools=TOOLS):
        assert _content(response) == [
            ("reasoning", "I see: 你好"),
            ("message", "Let me look."),
            ("function_call", ("get_weather", ARGUMENTS)),
            ("function_call", ("now", "{}")),
        ]
        assert [item.status for item in response.output] == ["completed"] * 4
        calls = response.output[2:]
        assert len({call.call_id for call in calls}) == 2
        assert all(call.call_id.startswith("call_") and call.id.startswith("fc_") for call in calls)
        assert 5 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        assert [tool.name for tool in response.tools] == ["get_weather", "now"]


async def test_a_streams_events_come_in_order_and_are_numbered(start: Start) -> None:
    router = await start("hermes-tools", f"{THINKING}Yes.\n{CALL}")
    events = await _events(router, tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert _runs(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.status, last.id) == ("completed", first.id)
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in added] == ["in_progress"] * 3
    assert [item.id for item in added] == [item.id for item in done]
    assert done == last.output
    for index, item in enumerate(done):
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        assert {event.output_index for event in own} == {index}
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == {"reasoning": "I see: 你好", "message": "Yes.", "function_call": ARGUMENTS}[item.type]
        whole = [event for event in own if event.type.endswith((".text.done", "_text.done", "arguments.done"))]
        assert [getattr(event, "text", None) or getattr(event, "arguments", None) for event in whole] == [text]


async def test_the_raw_events_have_their_names(start: Start) -> None:
    router = await start("hermes-tools", "Yes.")
    answer = await router.http.post("/v1/responses", json={"model": MODEL, "input": "x", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = answer.text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_an_output_that_is_cut_is_incomplete_as_far_as_it_came(start: Start) -> None:
    router = await start("hermes-tools", f"Yes.\n{CALL}")
    for response in await _both(router, tools=TOOLS, max_output_tokens=60):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        message, call = response.output
        assert (message.status, call.status, call.name) == ("completed", "incomplete", "get_weather")
        assert call.arguments == ARGUMENTS[: len(call.arguments)] != ARGUMENTS


async def test_an_empty_output_has_no_items(start: Start) -> None:
    for response in await _both(await start("hermes-tools", "")):
        assert (response.output, response.output_text, response.status) == ([], "", "completed")


async def test_answers_are_parsed_with_pydantic(start: Start) -> None:
    router = await start("hermes-tools", JSON)
    parsed = await router.client.responses.parse(model=MODEL, input="Where to?", text_format=Trip)
    assert parsed.output_parsed == Trip(city="Bern", days=3)
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"
    async with router.client.responses.stream(model=MODEL, input="Where to?", text_format=Trip) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == Trip(city="Bern", days=3)


async def test_a_tools_arguments_are_parsed_with_pydantic(start: Start) -> None:
    router = await start("hermes-tools", f'<tool_call>\n{{"name": "Trip", "arguments": {JSON}}}\n</tool_call>')
    tool = openai.pydantic_function_tool(Trip)["function"]
    parsed = await router.client.responses.parse(
        model=MODEL,
        input="Where to?",
        tools=[{"type": "function", "name": "Trip", "parameters": tool["parameters"], "strict": True}],
        tool_choice="required",
    )
    (call,) = parsed.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Bern", "days": 3}


async def test_a_response_goes_back_as_the_input_of_the_next(start: Start) -> None:
    router = await start("hermes-tools", f"{THINKING}Let me look.\n{CALL}", store_responses=0)
    first = await router.client.responses.create(model=MODEL, input="How is it?", tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    items: list[Any] = [
        {"role": "user", "content": "How is it?"},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second = await router.client.responses.create(model=MODEL, input=items, tools=TOOLS)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


class TestErrors:
    async def test_they_have_the_types_of_the_official_client(self, start: Start) -> None:
        router = await start("hermes-tools", "x")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await router.client.responses.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refusal:
            await router.client.responses.create(model=MODEL, input="x", max_output_tokens=100_000)
        assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")
        with pytest.raises(openai.BadRequestError, match="not supported") as refusal:
            await router.client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
        assert refusal.value.param == "tools[0]"

    async def test_a_schema_that_can_not_be_enforced_is_named(self, start: Start) -> None:
        router = await start("hermes-tools", "x")
        schema: dict[str, object] = {"type": "object", "not": {}}
        form: Any = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refusal:
            await router.client.responses.create(model=MODEL, input="x", text=form)
        assert refusal.value.param == "text.format.schema"
        tool: Any = {"type": "function", "name": "f", "parameters": schema, "strict": True}
        with pytest.raises(openai.BadRequestError) as refusal:
            await router.client.responses.create(model=MODEL, input="x", tools=[tool])
        assert refusal.value.param == "tools[0].parameters"

    async def test_an_effort_that_the_template_does_not_know_is_named(self, start: Start) -> None:
        router = await start("chatml", "x")
        with pytest.raises(openai.BadRequestError) as refusal:
            await router.client.responses.create(model=MODEL, input="x", reasoning={"effort": "low"})
        assert refusal.value.param == "reasoning.effort"
        assert (await router.client.responses.create(model=MODEL, input="x", reasoning={"effort": "none"})).output_text

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "m"}', b'{"input": {}}', b"[" * 2000])
    async def test_no_body_is_an_error_of_the_server(self, start: Start, body: bytes) -> None:
        router = await start("hermes-tools", "x")
        answer = await router.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    async def test_a_stream_that_fails_ends_with_the_failed_response(self, start: Start) -> None:
        fails = asyncio.Event()
        router = await start("hermes-tools", "the quick brown fox", fails=fails, store_responses=60)
        last: Any = None
        async for event in await router.client.responses.create(model=MODEL, input="x", stream=True):
            fails.set()
            last = event
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )
        with pytest.raises(openai.NotFoundError):
            await router.client.responses.retrieve(last.response.id)
        with pytest.raises(openai.InternalServerError):
            await router.client.responses.create(model=MODEL, input="x")

    async def test_a_body_that_is_too_large_is_refused(self, start: Start) -> None:
        router = await start("hermes-tools", "x", max_body=1000)
        answer = await router.http.post("/v1/responses", json={"model": MODEL, "input": "x" * 1000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


class TestStoredResponses:
    async def test_they_are_continued_and_read_and_deleted(self, start: Start) -> None:
        router = await start("hermes-tools", f"{THINKING}Let me look.\n{CALL}", store_responses=60)
        responses = router.client.responses
        first = await responses.create(model=MODEL, input="How is it?", tools=TOOLS, instructions="Be brief.")
        call: Any = first.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        asked: Any = {"model": MODEL, "input": [result], "tools": TOOLS, "previous_response_id": first.id}
        second = await responses.create(**asked)
        assert second.previous_response_id == first.id
        stream = await responses.create(**asked | {"stream": True})
        third: Any = [event async for event in stream][-1].response
        items: list[Any] = [{"role": "user", "content": "How is it?"}, *first.output, result]
        whole = await responses.create(model=MODEL, input=items, tools=TOOLS, store=False)
        assert whole.usage is not None
        for continued in (second, third):
            assert continued.usage.input_tokens == whole.usage.input_tokens
        assert (await responses.retrieve(third.id)).output == third.output
        await responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as refusal:
            await responses.create(**asked)
        assert (refusal.value.param, refusal.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(whole.id)  # it was not stored
        # a response holds its whole conversation
        assert (await responses.create(model=MODEL, input="And?", previous_response_id=third.id)).output_text

    async def test_errors_in_what_continues_them_have_their_names(self, start: Start) -> None:
        router = await start("hermes-tools", "Yes.", store_responses=60)
        first = await router.client.responses.create(model=MODEL, input="x")
        result: Any = {"type": "function_call_output", "call_id": "other", "output": "sunny"}
        with pytest.raises(openai.BadRequestError) as refusal:
            await router.client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
        assert refusal.value.param == "input[0].call_id"

    async def test_another_tenant_has_none_of_them(self, start: Start) -> None:
        router = await start("hermes-tools", "Yes.", store_responses=60, api_key=["one", "two"])
        first = await router.client.responses.create(model=MODEL, input="x")
        other = router.client.with_options(api_key="two").responses
        for refused in (other.retrieve(first.id), other.delete(first.id)):
            with pytest.raises(openai.NotFoundError):
                await refused
        with pytest.raises(openai.BadRequestError):
            await other.create(model=MODEL, input="x", previous_response_id=first.id)
        assert (await router.client.responses.retrieve(first.id)).output_text == "Yes."

    async def test_without_the_setting_what_needs_them_is_refused(self, start: Start) -> None:
        router = await start("hermes-tools", "Yes.")
        fields: list[dict[str, Any]] = [{"store": True}, {"previous_response_id": "resp_1"}]
        for asked in fields:
            with pytest.raises(openai.BadRequestError, match="--store-responses") as refusal:
                await router.client.responses.create(model=MODEL, input="x", **asked)
            assert refusal.value.param in asked
        with pytest.raises(openai.BadRequestError, match="--store-responses"):
            await router.client.responses.retrieve("resp_1")
        assert (await router.client.responses.create(model=MODEL, input="x", store=False)).output_text == "Yes."

    async def test_a_stored_response_can_not_be_streamed(self, start: Start) -> None:
        router = await start("hermes-tools", "Yes.", store_responses=60)
        first = await router.client.responses.create(model=MODEL, input="x")
        answer: httpx.Response = await router.http.get(f"/v1/responses/{first.id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")

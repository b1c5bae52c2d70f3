"""The Messages API with the official client, a router on a socket and workers that answer known text."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.router.api.conftest import ARGUMENTS, CALL, NOW, Start
from tests.router.api.tool_models import MODEL
from tests.router.conftest import Router, StartRouter

QUESTION: Any = [{"role": "user", "content": "How is it?"}]
TOOLS: Any = [
    {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {}}}},
    {"name": "now", "description": "The time", "input_schema": {"type": "object"}},
]
THINKING = "<think>\nI see: 你好\n</think>\n\n"
JSON = '{"city": "Bern", "days": 3}'

Connect = Callable[[Router], Awaitable[anthropic.AsyncAnthropic]]


class Trip(BaseModel):
    """An answer that the model gives as JSON."""

    city: str
    days: int


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect(router)`: the official client."""
    clients: list[anthropic.AsyncAnthropic] = []

    async def make(router: Router) -> anthropic.AsyncAnthropic:
        key = router.client.api_key
        clients.append(anthropic.AsyncAnthropic(base_url=router.url, api_key=key, max_retries=0, timeout=30))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def _events(
    client: anthropic.AsyncAnthropic, on_event: Callable[[], None] = lambda: None, **asked: Any
) -> list[Any]:
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 500, **asked}
    events = []
    async for event in await client.messages.create(**body, stream=True):
        events.append(event)
        on_event()
    return events


async def _both(client: anthropic.AsyncAnthropic, **asked: Any) -> list[Any]:
    """The message in one piece, and that of a stream as the client's own helper puts it together."""
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 500, **asked}
    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_message()
    assert _content(streamed) == _content(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    return [whole, streamed]


def _content(message: Any) -> list[tuple[str, Any]]:
    value = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, value[block.type])) for block in message.content]


async def test_a_text_is_the_message(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", "the fox: 你好"))
    for message in await _both(client, system="Be brief.", metadata={"user_id": "u"}):
        assert _content(message) == [("text", "the fox: 你好")]
        assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (16, 0)
        assert usage.input_tokens > 0
        assert usage.output_tokens > 3


async def test_thinking_and_calls_are_blocks(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", f"{THINKING}Let me look.\n{CALL}\n{NOW}"))
    for message in await _both(client, tools=TOOLS):
        assert _content(message) == [
            ("thinking", "I see: 你好"),
            ("text", "Let me look."),
            ("tool_use", json.loads(ARGUMENTS)),
            ("tool_use", {}),
        ]
        assert message.stop_reason == "tool_use"
        calls = message.content[2:]
        assert [call.name for call in calls] == ["get_weather", "now"]
        assert len({call.id for call in calls}) == 2
        assert 5 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


async def test_the_client_knows_the_id_of_its_request(start: Start, connect: Connect) -> None:
    router = await start("hermes-tools", "Yes.")
    client = await connect(router)
    message = await client.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
    assert (await router.http.get(f"/requests/{message._request_id}")).status_code == 200
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await client.messages.create(model=MODEL, max_tokens=9, messages=[])
    assert refusal.value.request_id


async def test_a_streams_events_come_in_order(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", f"{THINKING}Yes.\n{CALL}"))
    events = await _events(client, tools=TOOLS)
    kinds = [event.type for event in events]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kind != kinds[place - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block * 3, "message_delta", "message_stop"]
    begun = events[0].message
    assert (begun.content, begun.stop_reason, begun.usage.cache_read_input_tokens) == ([], None, 16)
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2]
    assert [event.content_block.type for event in starts] == ["thinking", "text", "tool_use"]
    assert starts[2].content_block.input == {}
    deltas = [(event.index, event.delta) for event in events if event.type == "content_block_delta"]
    for index, kind, field, text in (
        (0, "thinking_delta", "thinking", "I see: 你好"),
        (1, "text_delta", "text", "Yes."),
        (2, "input_json_delta", "partial_json", ARGUMENTS),
    ):
        own = [delta for place, delta in deltas if place == index]
        assert {delta.type for delta in own} == {kind}
        assert "".join(getattr(delta, field) for delta in own) == text
    ended = events[-2]
    assert ended.delta.stop_reason == "tool_use"
    assert ended.usage.output_tokens > len(deltas)


async def test_an_output_that_is_cut_has_the_input_so_far(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", f"Yes.\n{CALL}"))
    for message in await _both(client, tools=TOOLS, max_tokens=70):
        assert message.stop_reason == "max_tokens"
        text, call = message.content
        assert (text.text, call.name) == ("Yes.", "get_weather")
        assert call.input in ({}, {"city": "Zürich"}, {"city": "Zürich", "days": []})


async def test_line_breaks_in_an_input_break_no_client(start: Start, connect: Connect) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {"a": "x\ny"}}\n</tool_call>'
    client = await connect(await start("hermes-tools", call))
    for message in await _both(client, tools=TOOLS):
        assert _content(message) == [("tool_use", {"a": "x\ny"})]


@pytest.mark.parametrize("scalar", ["True", "nope", "01", "+1"])
async def test_an_input_that_is_no_json_breaks_no_client(start: Start, connect: Connect, scalar: str) -> None:
    call = f'<tool_call>\n{{"name": "now", "arguments": {{"a": 1, "b": {scalar}}}}}\n</tool_call>'
    client = await connect(await start("hermes-tools", call))
    for message in await _both(client, tools=TOOLS):
        assert _content(message)[0] == ("tool_use", {"a": 1})


async def test_the_stop_sequence_is_named(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", "the quick brown fox"))
    for message in await _both(client, stop_sequences=["dog", "brown"]):
        assert _content(message) == [("text", "the quick ")]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "brown")


async def test_only_the_first_call_comes_back_without_parallel_calls(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", f"{NOW}\n{CALL}"))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for message in await _both(client, tools=TOOLS, tool_choice=choice):
        assert _content(message) == [("tool_use", {})]


async def test_answers_are_parsed_with_pydantic(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", JSON))
    parsed = await client.messages.parse(model=MODEL, max_tokens=100, messages=QUESTION, output_format=Trip)
    assert parsed.parsed_output == Trip(city="Bern", days=3)


async def test_thinking_is_switched_by_the_template(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", "I see.</think>Yes."))
    asked: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    for message in await _both(client, **asked):
        assert _content(message) == [("thinking", "I see."), ("text", "Yes.")]
        assert message.content[0].signature == ""
    (message, _) = await _both(client, thinking={"type": "disabled"})
    assert _content(message) == [("text", "I see.</think>Yes.")]


async def test_a_message_goes_back_with_its_results(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", f"{THINKING}Let me look.\n{CALL}"))
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS}
    first = await client.messages.create(**asked, messages=QUESTION, max_tokens=500)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
    messages: Any = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await client.messages.create(**asked, messages=messages, max_tokens=500)
    counted = await client.messages.count_tokens(**asked, messages=messages)
    usage = second.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens > first.usage.input_tokens + first.usage.output_tokens


async def test_counting_is_that_of_the_prompt(start: Start, connect: Connect) -> None:
    client = await connect(await start("hermes-tools", "Yes."))
    for asked in ({}, {"tools": TOOLS}, {"system": "Be brief."}, {"thinking": {"type": "adaptive"}}):
        fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, **asked}
        counted = await client.messages.count_tokens(**fields)
        usage = (await client.messages.create(**fields, max_tokens=9)).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


class TestErrors:
    async def test_they_have_the_types_of_the_official_client(self, start: Start, connect: Connect) -> None:
        client = await connect(await start("hermes-tools", "x", api_key=["one"]))
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="other", max_tokens=9, messages=QUESTION)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await client.messages.create(model=MODEL, max_tokens=100_000, messages=QUESTION, timeout=30)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="two").messages.create(model=MODEL, max_tokens=9, messages=QUESTION)

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "kind"),
        [
            ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
            ("POST", "/v1/messages", b'{"model": "tool-model", "messages": []}', 400, "invalid_request_error"),
            ("POST", "/v1/messages", b"x" * 2000, 413, "request_too_large"),
            ("POST", "/v1/messages/count_tokens", b"[" * 900, 400, "invalid_request_error"),
            ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ],
    )
    async def test_they_have_anthropics_form(
        self, start: Start, method: str, path: str, body: bytes, status: int, kind: str
    ) -> None:
        router = await start("hermes-tools", "x", max_body=1000)
        answer = await router.http.request(method, path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        error = answer.json()
        assert error.keys() == {"type", "error"}
        assert (error["type"], error["error"].keys(), error["error"]["type"]) == ("error", {"type", "message"}, kind)

    async def test_without_a_worker_the_server_is_overloaded(self, start_router: StartRouter) -> None:
        body = {"model": "small-model", "max_tokens": 9, "messages": QUESTION}
        answer = await (await start_router()).http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
        assert answer.headers["retry-after"]

    async def test_a_stream_that_fails_ends_with_an_error(self, start: Start, connect: Connect) -> None:
        fails = asyncio.Event()
        router = await start("hermes-tools", "the quick brown fox", fails=fails)
        client = await connect(router)
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": QUESTION}
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            await _events(client, on_event=fails.set)
        assert fails.is_set()  # it had begun
        whole = await router.http.post("/v1/messages", json=body)
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")

    async def test_a_schema_that_can_not_be_enforced_is_named(self, start: Start, connect: Connect) -> None:
        client = await connect(await start("hermes-tools", "x"))
        schema: Any = {"type": "object", "not": {}}
        for asked, name in (
            ({"output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config.format.schema"),
            ({"tools": [{"name": "f", "input_schema": schema, "strict": True}]}, r"tools\[0\].input_schema"),
        ):
            fields: Any = asked
            with pytest.raises(anthropic.BadRequestError, match=name):
                await client.messages.create(model=MODEL, max_tokens=9, messages=QUESTION, **fields)


async def test_a_key_may_be_in_either_header(start: Start) -> None:
    router = await start("hermes-tools", "Yes.", api_key=["one"])
    body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION}
    for sent, status in (
        ({"x-api-key": "one"}, 200),
        ({"x-api-key": "two"}, 401),
        ({"x-api-key": "two", "authorization": "Bearer one"}, 200),
        ({"authorization": ""}, 401),
    ):
        headers = {"authorization": "", **sent} if "authorization" in sent else sent
        request = router.http.build_request("POST", "/v1/messages", json=body)
        del request.headers["authorization"]
        request.headers.update({name: value for name, value in headers.items() if value})
        assert (await router.http.send(request)).status_code == status, sent

"""LangChain's ChatOpenAI: tools and typed answers, over chats and over the Responses API."""

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.router.api.conftest import ARGUMENTS, CALL, Start
from tests.router.api.tool_models import MODEL
from tests.router.conftest import Router

JSON = '{"city": "Bern", "days": 3}'

both_apis = pytest.mark.parametrize("responses_api", [False, True], ids=["chats", "responses"])


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


@tool
def get_weather(city: str, days: list[int]) -> str:
    """The weather of a city."""
    return "sunny"


def _model(router: Router, *, responses_api: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{router.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        use_responses_api=responses_api,
        stream_usage=True,
    )


def _text(message: Any) -> str:
    """The text of a message, whose content is a text or a list of blocks."""
    if isinstance(message.content, str):
        return message.content
    return "".join(block["text"] for block in message.content if block["type"] == "text")


async def _streamed(model: Any, messages: Any) -> Any:
    """The message that the chunks of a stream add up to."""
    chunks = [chunk async for chunk in model.astream(messages)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


@both_apis
async def test_tools_are_called_and_results_go_back(start: Start, responses_api: bool) -> None:
    model = _model(await start("hermes-tools", f"Let me look.\n{CALL}"), responses_api=responses_api)
    with_tools = model.bind_tools([get_weather])
    question = HumanMessage("How is it?")
    answer = await with_tools.ainvoke([question])
    streamed = await _streamed(with_tools, [question])
    for message in (answer, streamed):
        assert isinstance(message, AIMessage)
        assert _text(message) == "Let me look."
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", json.loads(ARGUMENTS))
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] > 10
        result = ToolMessage("sunny", tool_call_id=call["id"])
        assert (await with_tools.ainvoke([question, message, result])).tool_calls


@both_apis
async def test_a_tool_can_be_forced(start: Start, responses_api: bool) -> None:
    call = f'<tool_call>\n{{"name": "Trip", "arguments": {JSON}}}\n</tool_call>'
    model = _model(await start("hermes-tools", call), responses_api=responses_api)
    forced = model.bind_tools([Trip], tool_choice="Trip", strict=True)
    (found,) = (await forced.ainvoke("Where to?")).tool_calls
    assert (found["name"], found["args"]) == ("Trip", {"city": "Bern", "days": 3})


@both_apis
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # of LangChain's own
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_answers_are_typed(start: Start, responses_api: bool, method: Any) -> None:
    call = f'<tool_call>\n{{"name": "Trip", "arguments": {JSON}}}\n</tool_call>'
    router = await start("hermes-tools", call if method == "function_calling" else JSON)
    typed = _model(router, responses_api=responses_api).with_structured_output(Trip, method=method)
    assert await typed.ainvoke("Where to?") == Trip(city="Bern", days=3)
    assert [part async for part in typed.astream("Where to?")][-1] == Trip(city="Bern", days=3)

"""OpenAI's Responses API, Anthropic's client and LangChain, with workers that compute what grammars allow."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from annotated_types import Interval, MaxLen
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

from models import tiny
from tests.e2e.cluster import Cluster
from tests.e2e.test_forced_calls import with_markers

pytestmark = pytest.mark.e2e

LONG = "tell " * 150
MOST = 200


class Trip(BaseModel):
    """A trip."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, MaxLen(8)]
    days: Annotated[int, Interval(ge=0, le=31)]
    by: Literal["train", "boat"]


class Ticket(BaseModel):
    """A trip without limits on texts and numbers, which Anthropic's client leaves out of the schema."""

    city: Literal["Bern", "Cairo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = with_markers(tmp_path_factory.mktemp("model") / "tiny")
    with Cluster(
        model=str(model), served_model_name=tiny.NAME, long_prefill_tokens=64, store_responses=60.0
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("text", ["tell", LONG], ids=["local", "remote"])
def test_responses_and_messages_and_chats_are_the_same_text(
    client: openai.OpenAI, claude: anthropic.Anthropic, text: str
) -> None:
    chat = client.chat.completions.create(
        model=tiny.NAME, messages=[{"role": "user", "content": text}], temperature=0, max_completion_tokens=20
    )
    asked: dict[str, Any] = {"model": tiny.NAME, "input": text, "temperature": 0, "max_output_tokens": 20}
    response = client.responses.create(**asked)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.total_tokens == chat.usage.total_tokens
    last: Any = list(client.responses.create(**asked, stream=True))[-1]
    assert last.response.output_text == response.output_text
    message = claude.messages.create(
        model=tiny.NAME,
        messages=[{"role": "user", "content": text}],
        max_tokens=20,
        extra_body={"temperature": 0},
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": response.output_text}]
    assert message.stop_reason == "max_tokens"


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": tiny.NAME, "temperature": 0, "max_output_tokens": 10}
    first = client.responses.create(**asked, input="tell", store=True)
    second = client.responses.create(**asked, input="more", previous_response_id=first.id)
    items: Any = [{"role": "user", "content": "tell"}, *first.output, {"role": "user", "content": "more"}]
    assert client.responses.create(**asked, input=items, store=False).output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_typed_answers_are_valid_in_every_api(
    cluster: Cluster, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """The limits are for outputs that reason first: without one, that takes all of the context."""
    asked: dict[str, Any] = {"model": tiny.NAME, "input": "tell", "max_output_tokens": MOST}
    assert isinstance(client.responses.parse(**asked, text_format=Trip).output_parsed, Trip)
    with client.responses.stream(**asked, text_format=Trip) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Trip)
    message = claude.messages.parse(
        model=tiny.NAME, max_tokens=MOST, messages=[{"role": "user", "content": "tell"}], output_format=Ticket
    )
    assert isinstance(message.parsed_output, Ticket)
    for responses_api in (False, True):
        model = ChatOpenAI(
            model=tiny.NAME,
            base_url=f"{cluster.url}/v1",
            api_key=SecretStr("none"),
            max_completion_tokens=MOST,
            use_responses_api=responses_api,
        )
        assert isinstance(model.with_structured_output(Trip, method="json_schema").invoke("tell"), Trip)
        forced = model.bind_tools([Trip], tool_choice="Trip", strict=True).invoke("tell")
        assert [Trip(**call["args"]) for call in forced.tool_calls]


def test_forced_calls_are_valid_in_every_api(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    schema = Trip.model_json_schema()
    response = client.responses.create(
        model=tiny.NAME,
        input="tell",
        tools=[{"type": "function", "name": "Trip", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "Trip"},
        max_output_tokens=MOST,
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert Trip.model_validate_json(call.arguments)
    with claude.messages.stream(
        model=tiny.NAME,
        max_tokens=MOST,
        messages=[{"role": "user", "content": "tell"}],
        tools=[{"name": "Trip", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "Trip"},
    ) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use"
    assert Trip.model_validate(block.input)
    assert message.stop_reason == "tool_use"

"""OpenAI's official client asks a cluster with the bundled model for structured outputs."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from models import tiny
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int
    tags: list[bool] | None


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    settings: dict[str, Any] = {"model": str(tiny.CHECKPOINT), "served_model_name": tiny.NAME}
    with (
        Cluster(**settings, long_prefill_tokens=64) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client: openai.OpenAI, text: str, seed: int, **fields: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    extra = fields.pop("extra_body", None)
    answer = client.chat.completions.create(
        model=tiny.NAME, messages=messages, seed=seed, max_tokens=300, extra_body=extra, **fields
    )
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    assert answer.choices[0].finish_reason == "stop"
    return content


@pytest.mark.parametrize("length", [3, 150])
def test_documents_follow_their_schema_on_every_route(client: openai.OpenAI, length: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(4):
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        document = json.loads(ask(client, "tell " * length, seed, response_format=form))
        assert document.keys() == {"name", "age"}
        assert len(document["name"]) <= 8
        assert 0 <= document["age"] <= 99


def test_the_clients_own_helper_gets_an_object_or_is_told_that_the_limit_was_reached(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who?"}]
    try:
        parsed = client.chat.completions.parse(
            model=tiny.NAME, messages=messages, response_format=Person, seed=1, max_tokens=400
        )
    except openai.LengthFinishReasonError:
        return
    assert isinstance(parsed.choices[0].message.parsed, Person)


@pytest.mark.parametrize("length", [3, 150])
def test_choices_and_expressions_are_followed(client: openai.OpenAI, length: int) -> None:
    text = "tell " * length
    assert ask(client, text, 1, extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
    year = ask(client, text, 1, extra_body={"structured_outputs": {"regex": "(19|20)[0-9]{2}"}})
    assert len(year) == 4
    assert year.isdigit()
    assert ask(client, text, 1, extra_body={"guided_grammar": 'root ::= "a" | "b"'}) in ("a", "b")


def test_a_stream_is_the_same_document(client: openai.OpenAI) -> None:
    extra = {"guided_regex": "[a-z]{20}"}
    messages: Any = [{"role": "user", "content": "Hello?"}]
    stream = client.chat.completions.create(
        model=tiny.NAME, messages=messages, seed=7, max_tokens=300, extra_body=extra, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ask(client, "Hello?", 7, extra_body=extra)
    assert len(text) == 20


def test_what_is_wrong_is_named(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, "Hello?", 1, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"

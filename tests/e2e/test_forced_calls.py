"""OpenAI's official client forces tool calls of a cluster whose model knows tools and may think."""

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from models import tiny
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = Path(__file__).parents[1] / "router" / "text" / "templates" / "hermes-tools.jinja"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 31}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


def with_markers(directory: Path) -> Path:
    """The bundled model with a template that knows tools. Its last tokens have become the markers."""
    shutil.copytree(tiny.CHECKPOINT, directory)
    file = directory / "tokenizer.json"
    written = json.loads(file.read_text())
    model = written["model"]
    del model["merges"][-len(MARKERS) :]
    last = sorted(model["vocab"], key=model["vocab"].get)[-len(MARKERS) :]
    for token, marker in zip(last, MARKERS, strict=True):
        model["vocab"][marker] = model["vocab"].pop(token)
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(file))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.read_text()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = with_markers(tmp_path_factory.mktemp("model") / "tiny")
    with (
        Cluster(model=str(model), served_model_name=tiny.NAME, long_prefill_tokens=64) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client: openai.OpenAI, seed: int, length: int = 3, **fields: Any) -> Any:
    """The first choice of a response, which is the same as that of a stream."""
    body: dict[str, Any] = {
        "model": tiny.NAME,
        "messages": [{"role": "user", "content": "tell " * length}],
        "seed": seed,
        "max_tokens": 300,
    }
    whole = client.chat.completions.create(**body, **fields).choices[0]
    extra = fields.pop("extra_body", {}) | fields
    with client.chat.completions.stream(**body, extra_body=extra) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(whole) == calls_of(streamed)
    assert (whole.message.content or "") == (streamed.message.content or "")
    assert whole.finish_reason == streamed.finish_reason
    return whole


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def token(client: openai.OpenAI, text: str) -> str:
    """The id of a token."""
    body = {"model": tiny.NAME, "prompt": text, "max_tokens": 1, "return_token_ids": True}
    answer: Any = client.post("/completions", body=body, cast_to=dict[str, Any])
    (token_id,) = answer["choices"][0]["prompt_token_ids"]
    return str(token_id)


def validate(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        schema = SCHEMA if name == "get_weather" else {"const": {}}
        importlib.import_module("jsonschema").validate(json.loads(arguments), schema)


@pytest.mark.parametrize("length", [3, 150])
def test_forced_calls_come_and_are_valid_on_every_route(client: openai.OpenAI, length: int) -> None:
    for seed in range(3):
        choice = ask(client, seed, length, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert (len(calls_of(choice)), choice.message.content, choice.finish_reason) == (1, None, "tool_calls")
        validate(calls_of(choice))
        choice = ask(client, seed, length, tools=TOOLS, tool_choice=WEATHER)
        assert [name for name, _ in calls_of(choice)] == ["get_weather"]
        assert (choice.message.content, choice.finish_reason) == (None, "stop")
        validate(calls_of(choice))


def test_a_strict_tool_that_the_model_chooses_to_call_gets_valid_arguments(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=tiny.NAME,
            messages=[{"role": "user", "content": "tell"}],
            seed=seed,
            max_tokens=300,
            tools=TOOLS,
            parallel_tool_calls=False,
            logit_bias={token(client, "<tool_call>"): 100},
        )
        (call,) = calls_of(answer.choices[0])  # behind it the model may write on
        assert isinstance(json.loads(call[1]), dict)
        validate([call] if call[0] == "get_weather" else [])  # the other one is not strict


def test_an_answer_follows_its_schema_behind_the_reasoning(client: openai.OpenAI) -> None:
    choice = ask(
        client,
        1,
        logit_bias={token(client, "</think>"): 9},
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    assert choice.finish_reason == "stop"
    validate([("get_weather", choice.message.content)])


@pytest.mark.parametrize("length", [3, 150])
@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}])
def test_reasoning_ends_after_its_budget_on_every_route(client: openai.OpenAI, length: int, form: Any) -> None:
    for begun in (True, False):
        extra = {"chat_template_kwargs": {"enable_thinking": begun}, "thinking_token_budget": 10}
        answer: Any = client.chat.completions.create(
            model=tiny.NAME,
            messages=[{"role": "user", "content": "tell " * length}],
            seed=length,
            max_tokens=60,
            logit_bias={
                token(client, "<think>"): 100 * (not begun),
                token(client, "</think>"): -50,
                token(client, "<|im_end|>"): -50,
            },
            response_format=form,
            extra_body=extra | {"return_token_ids": True},
        )
        (choice,) = answer.choices
        assert choice.token_ids.index(int(token(client, "</think>"))) == 10 + (not begun)
        assert choice.message.reasoning

"""Forced calls, strict tools, and grammars behind reasoning, with the official client.

The worker answers with a random text that the grammar of the request allows.
"""

import importlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from cpd.grammar.compiler import Vocabulary
from cpd.grammar.grammar import Grammar, GrammarKind
from cpd.rpc import cpd_pb2 as pb
from tests.router.api.tool_models import MARKERS, MODEL, QUESTION, make_tool_model
from tests.router.conftest import Router, StartRouter, StartWorker
from tests.router.fake_worker import Answer, FakeWorker, outputs

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5, "description": "Where"}, "days": {"enum": [1, None]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT: Any = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}

Start = Callable[..., Awaitable[tuple[Router, FakeWorker]]]


@pytest.fixture
def start(start_router: StartRouter, start_worker: StartWorker, model_dir: Path, tmp_path: Path) -> Start:
    """`await start("template", …)`: a router and its worker. `markers` are special tokens of the model."""

    async def make(
        template: str, *, grammars: bool = True, markers: tuple[str, ...] = MARKERS, **settings: Any
    ) -> tuple[Router, FakeWorker]:
        directory = tmp_path / MODEL
        tokenizer, end = make_tool_model(model_dir, directory, template, markers)
        vocabulary = Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            asked = submit.sampling.grammar
            grammar, ids = Grammar(GrammarKind(asked.kind), asked.text), tokenizer.encode("".join(markers)).ids
            answer = _walk(vocabulary, grammar, ids, end, submit.sampling.seed)
            for output in outputs(submit, [answer]):
                yield output

        hello = {"max_model_len": 4096, "num_pages": 1000, "grammars": grammars}
        worker: FakeWorker = await start_worker(script, hello=hello)
        return await start_router(worker, model=str(directory), **settings), worker

    return make


def _walk(vocabulary: Vocabulary, grammar: Grammar, markers: Collection[int], end: int, seed: int) -> list[int]:
    """Random allowed tokens, the end among them, which is likely where it may come."""
    rng, constraint, tokens = random.Random(seed), vocabulary.compile(grammar).constraint([end]), list[int]()
    while end not in tokens and len(tokens) < 4000:
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        special = [token for token in allowed if token in markers]
        over = end in allowed and rng.random() < 0.2
        tokens.append(end if over else rng.choice(special if special and rng.random() < 0.4 else allowed))
        assert constraint.accept(tokens[-1])
    return tokens


async def _whole_and_streamed(router: Router, **asked: Any) -> list[Any]:
    """The first choice of both responses to the same request, which are equal but for the ids of calls."""
    whole = await router.client.chat.completions.create(model=MODEL, messages=QUESTION, **asked)
    extra: Any = asked.pop("extra_body", {}) | asked
    async with router.client.chat.completions.stream(model=MODEL, messages=QUESTION, extra_body=extra) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    return [whole.choices[0], streamed.choices[0]]


def _calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def _reasoning(choice: Any) -> str | None:
    return getattr(choice.message, "reasoning", None)


def _validate(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        schema = SCHEMA if name == "get_weather" else {"const": {}}
        importlib.import_module("jsonschema").validate(json.loads(arguments), schema)


FORMATS = {
    "hermes": ("hermes-tools", {}),
    "llama3_json": ("llama3-tools", {}),
    "mistral": ("mistral-tools", {}),
    "json": ("{{ tools }}", {"tool_call_parser": "json"}),
    "pythonic": ("{{ tools }}", {"tool_call_parser": "pythonic"}),
}


@pytest.mark.parametrize("markers", [MARKERS, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
async def test_forced_calls_come_and_are_valid(start: Start, name: str, markers: tuple[str, ...]) -> None:
    template, settings = FORMATS[name]
    router, _ = await start(template, markers=markers, **settings)
    counts = set[int]()
    for seed in range(6):
        whole, streamed = await _whole_and_streamed(router, tools=TOOLS, tool_choice="required", seed=seed)
        assert _calls(whole) == _calls(streamed) != []
        for choice in (whole, streamed):
            assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
        _validate(_calls(whole))
        counts.add(len(_calls(whole)))
        for choice in await _whole_and_streamed(router, tools=TOOLS, tool_choice=WEATHER, seed=seed):
            assert [name for name, _ in _calls(choice)] == ["get_weather"]
            assert (choice.message.content or None, choice.finish_reason) == (None, "stop")
            _validate(_calls(choice))
        (single, _) = await _whole_and_streamed(
            router, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(_calls(single)) == 1
    assert len(counts) > 1


async def test_a_forced_call_that_is_cut_says_so(start: Start) -> None:
    router, _ = await start("hermes-tools")
    body: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": WEATHER}
    answer = await router.client.chat.completions.create(**body, max_tokens=42)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("template", ["hermes-tools", "mistral-tools"])
async def test_calls_of_strict_tools_are_valid_wherever_the_model_makes_them(start: Start, template: str) -> None:
    router, _ = await start(template, reasoning_parser="none")
    called = 0
    for seed in range(8):
        whole, streamed = await _whole_and_streamed(router, tools=STRICT, seed=seed)
        assert _calls(whole) == _calls(streamed)
        assert whole.message.content == streamed.message.content
        _validate(_calls(whole))
        called += len(_calls(whole))
    assert called


async def test_the_answer_follows_its_grammar_behind_the_reasoning_that_the_prompt_began(start: Start) -> None:
    router, worker = await start("hermes-tools")
    for asked, check in (
        ({"extra_body": {"guided_choice": ["yes", "no"]} | THINKING}, lambda content: ["yes", "no"].index(content)),
        (
            {"response_format": {"type": "json_object"}, "extra_body": THINKING},
            lambda content: json.loads(content).keys(),
        ),
    ):
        for seed in range(4):
            whole, streamed = await _whole_and_streamed(router, seed=seed, **asked)
            for choice in (whole, streamed):
                check(choice.message.content)
                assert _reasoning(choice) == _reasoning(whole)
                assert choice.finish_reason == "stop"
    reasonings = []
    for seed in range(4):
        for choice in await _whole_and_streamed(
            router, tools=TOOLS, tool_choice="required", seed=seed, extra_body=THINKING
        ):
            assert not choice.message.content
            _validate(_calls(choice))
            reasonings.append(_reasoning(choice))
    assert any(reasonings)
    assert await _whole_and_streamed(router, extra_body={"guided_choice": ["yes"]})
    assert "start: reasoning? content" in worker.submits[-1].sampling.grammar.text  # the prompt began none


async def test_with_a_response_format_the_model_may_still_call_tools(start: Start) -> None:
    router, worker = await start("hermes-tools")
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    called = set[bool]()
    for seed in range(6):
        whole, streamed = await _whole_and_streamed(router, tools=STRICT, response_format=form, seed=seed)
        assert _calls(whole) == _calls(streamed)
        assert (whole.message.content or "") == (streamed.message.content or "")
        assert bool(whole.message.content) != bool(_calls(whole))
        if whole.message.content:
            _validate([("get_weather", whole.message.content)])
        called.add(bool(_calls(whole)))
    assert called == {True, False}
    body: Any = {"model": MODEL, "messages": QUESTION, "tools": _tools(UNENFORCEABLE), "response_format": form}
    await router.client.chat.completions.create(**body, max_tokens=1)
    assert "uniqueItems" not in worker.submits[-1].sampling.grammar.text  # the tool is not strict
    await _whole_and_streamed(router, tools=STRICT, response_format=form, tool_choice="none")
    assert "calls" not in worker.submits[-1].sampling.grammar.text


async def test_without_a_token_that_begins_calls_a_response_format_leaves_no_room_for_them(start: Start) -> None:
    router, worker = await start("llama3-tools")
    for choice in await _whole_and_streamed(router, tools=TOOLS, response_format={"type": "json_object"}):
        assert not _calls(choice)
        assert json.loads(choice.message.content) is not None
    assert worker.submits[-1].sampling.grammar.kind == pb.Grammar.KIND_JSON_SCHEMA


async def test_a_response_format_means_nothing_for_forced_calls(start: Start) -> None:
    router, _ = await start("hermes-tools")
    asked: Any = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    for choice in await _whole_and_streamed(router, **asked):
        assert _calls(choice)


def _tools(*schemas: Any, **fields: Any) -> list[Any]:
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": schema, **fields}}
        for index, schema in enumerate(schemas)
    ]


UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("template", "asked", "param", "reason"),
    [
        (
            "hermes-tools",
            {"tools": _tools({}, UNENFORCEABLE), "tool_choice": "required"},
            "tools[1].function.parameters",
            '"uniqueItems"',
        ),
        (
            "hermes-tools",
            {"tools": _tools({}, UNENFORCEABLE, strict=True)},
            "tools[1].function.parameters",
            '"uniqueItems"',
        ),
        (
            "hermes-tools",
            {"tools": _tools({"enum": [["x" * 5000]]}), "tool_choice": "required"},
            "tools[0].function.parameters",
            "at most",
        ),
        ("llama3-tools", {"tools": STRICT}, "tools[0].function.strict", "'tool_choice' forces calls"),
        (
            "hermes-tools",
            {"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}},
            "guided_regex",
            "tool calls",
        ),
        (
            "hermes-tools",
            {"tools": TOOLS, "tool_choice": WEATHER, "extra_body": {"ignore_eos": True}},
            "ignore_eos",
            "tool_choice",
        ),
    ],
)
async def test_what_can_not_be_enforced_is_refused_with_the_reason(
    start: Start, template: str, asked: dict[str, Any], param: str, reason: str
) -> None:
    router, worker = await start(template)
    for _ in range(2):  # the second is remembered
        with pytest.raises(openai.BadRequestError, match=reason) as refusal:
            await router.client.chat.completions.create(model=MODEL, messages=QUESTION, **asked)
        assert refusal.value.param == param
    assert not worker.submits


async def test_only_the_schemas_that_must_be_followed_are_checked(start: Start) -> None:
    router, worker = await start("hermes-tools")
    tools = [*TOOLS, *_tools(UNENFORCEABLE)]
    for asked in ({"tool_choice": WEATHER}, {"tools": [*STRICT, *_tools(UNENFORCEABLE)]}):
        variant: Any = {"tools": tools, **asked}
        await router.client.chat.completions.create(model=MODEL, messages=QUESTION, **variant)
    assert len(worker.submits) == 2


async def test_without_a_worker_that_follows_grammars_forced_calls_are_refused(start: Start) -> None:
    router, _ = await start("hermes-tools", grammars=False)
    for asked, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": STRICT}, "tools[0].function.strict"),
    ):
        body: Any = {"model": MODEL, "messages": QUESTION, **asked}
        with pytest.raises(openai.BadRequestError, match="no worker") as refusal:
            await router.client.chat.completions.create(**body)
        assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")

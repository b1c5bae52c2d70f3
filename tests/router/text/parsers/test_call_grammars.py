"""Whatever the grammars of calls and reasoning allow is what the parsers find: random ways through the masks."""

import importlib
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import Vocabulary, check
from cpd.grammar.constraint import TokenConstraint
from cpd.grammar.grammar import Grammar, GrammarError
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.events import CallArguments, CallStart, Content, Reasoning
from router.text.parsers.output import FORCED_PARSERS, TOOL_PARSERS, OutputFormat

CHECKPOINT = Path(__file__).resolve().parents[4] / "models" / "tiny" / "checkpoint"
EOS = 0
SPECIAL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]")

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6, "description": "Where"},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
            "unit": {"enum": ["°C", 'a"b\\', None]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"day": {"type": "number", "minimum": -5, "maximum": 5}},
    },
    "get": {"type": "object", "additionalProperties": False},
    "get_all": {"type": "object", "properties": {"description": {"type": "boolean"}}, "required": ["description"]},
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The markers are special tokens, added tokens that are not special, or text; `named` has [ARGS], too."""
    made = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    if kind in ("special", "named"):
        made.add_special_tokens([*SPECIAL, *TAGS, *(["[ARGS]"] if kind == "named" else [])])
    if kind == "added":
        made.add_tokens([AddedToken(token, special=False) for token in (*SPECIAL, *TAGS)])
    return made


@cache
def vocabulary(kind: str) -> Vocabulary:
    made = tokenizer(kind)
    return Vocabulary(made.to_str(), made.get_vocab_size(), [EOS])


def rules(kind: str, *, many: bool = True) -> CallRules:
    return CallRules(SCHEMAS, many, tokenizer(kind).token_to_id)


def allowed(constraint: TokenConstraint) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    assert not constraint.error, constraint.error
    return [int(token) for token in np.flatnonzero(bits)]


def walk(kind: str, grammar: Grammar, seed: int) -> str:
    """The text of random allowed tokens. Those that close something are taken more often, so that it ends."""
    check(grammar)
    rng, constraint, tokens = random.Random(seed), vocabulary(kind).compile(grammar).constraint([EOS]), list[int]()
    closing = {tokenizer(kind).encode(text).ids[0] for text in ('"', "}", "]", ",", ";", *SPECIAL, *TAGS)}
    for _ in range(1500):
        choices = allowed(constraint)
        preferred = [token for token in choices if token in closing or (token == EOS and len(tokens) > 60)]
        token = rng.choice(preferred if preferred and rng.random() < 0.3 else choices)
        assert constraint.accept(token), constraint.error
        if token == EOS:
            return str(tokenizer(kind).decode(tokens, skip_special_tokens=False))
        tokens.append(token)
    raise AssertionError("it does not end")


def parse(form: OutputFormat, text: str, prompt: str = "", *, forced: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and calls with their arguments."""
    parser = form.parser(prompt, list(SCHEMAS), parallel=True, forced=forced)
    events = parser.push(text) + parser.flush(cut=False)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    arguments = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    return (
        reasoning,
        content,
        [(event.name, arguments[event.index]) for event in events if isinstance(event, CallStart)],
    )


def validate(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        importlib.import_module("jsonschema").validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("kind", ["special", "named", "added", "text"])
@pytest.mark.parametrize("name", FORCED_PARSERS)
def test_forced_calls_are_parsed_and_their_arguments_are_valid(name: str, kind: str) -> None:
    form, counts, called = OutputFormat(name), set[int](), set[str]()
    for seed in range(40):
        grammar = form.forced_calls("", rules(kind, many=seed >= 4))
        reasoning, content, calls = parse(form, walk(kind, grammar, seed), forced=True)
        assert (reasoning, content) == ("", "")
        assert len(calls) == 1 if seed < 4 else calls
        validate(calls)
        counts.add(len(calls))
        called |= {name for name, _ in calls}
    assert len(counts) > 1
    assert called == set(SCHEMAS)


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_text_may_have_calls_anywhere_and_all_are_valid(name: str, kind: str) -> None:
    form, counts = OutputFormat(name), set[int]()
    for seed in range(12):
        grammar = form.text_with_calls(rules(kind))
        assert grammar is not None
        _, content, calls = parse(form, walk(kind, grammar, seed), forced=False)
        assert FORCED_PARSERS[name].OPENING not in content
        validate(calls)
        counts.add(len(calls))
    assert len(counts) > 1


@pytest.mark.parametrize("kind", ["special", "named", "added"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_an_output_may_be_an_answer_by_its_schema_or_calls(name: str, kind: str) -> None:
    form, found = OutputFormat(name, "think"), set[bool]()
    for seed in range(12):
        prompt = "<think>\n" if seed % 2 else ""
        grammar = form.answer_or_calls(prompt, grammars.json_schema(SCHEMAS["get"]), rules(kind))
        assert grammar is not None
        _, content, calls = parse(form, walk(kind, grammar, seed), prompt, forced=False)
        assert bool(content) != bool(calls)
        validate(calls or [("get", content)])
        found.add(bool(calls))
    assert found == {True, False}


def test_calls_that_no_token_begins_are_no_part_of_a_text() -> None:
    assert set(FORCED_PARSERS) == set(TOOL_PARSERS)
    answer = grammars.choice(["a"])
    for name, kind in (("hermes", "text"), ("json", "special"), ("llama3_json", "special"), ("pythonic", "special")):
        assert OutputFormat(name).text_with_calls(rules(kind)) is None
        assert OutputFormat(name).answer_or_calls("", answer, rules(kind)) is None


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", ["think", "mistral"])
def test_a_grammar_begins_behind_the_reasoning_that_the_prompt_began(name: str, kind: str) -> None:
    form = OutputFormat("hermes", name)
    prompt = {"think": "…<think>\n", "mistral": "…[THINK]"}[name]
    token_id = tokenizer(kind).token_to_id
    answers: list[tuple[Grammar, Callable[[str], Any]]] = [
        (grammars.json_schema(SCHEMAS["get_all"]), lambda text: validate([("get_all", text)])),
        (grammars.choice(["yes", 'n"o']), lambda text: ["yes", 'n"o'].index(text)),
        (grammars.regex(r"a/b\/\\/[x/]\nc"), lambda text: ["a/b/\\/x\nc", "a/b/\\//\nc"].index(text)),
    ]
    closing = {"think": "</think>", "mistral": "[/THINK]"}[name]
    for answer, check_answer in answers:
        grammar = form.behind_reasoning(prompt, answer, token_id)
        assert grammar is not None
        for seed in range(4):
            if kind == "text":  # a random walk would hardly find the tag
                grammar = Grammar(grammar.kind, grammar.text.replace("/(?s:.*)", "/(?s:.{0,9})"))
            text = walk(kind, grammar, seed)
            assert closing in text
            _, content, calls = parse(form, text, prompt, forced=False)
            assert not calls
            check_answer(content)
    assert form.behind_reasoning(prompt, grammars.ebnf('start: "a"'), token_id) is None
    assert form.behind_reasoning(f"{prompt}{closing}\n\n", answers[0][0], token_id) is None  # it should not reason


@pytest.mark.parametrize("kind", ["special", "added"])
def test_a_model_may_reason_before_a_grammar_if_the_prompt_says_nothing(kind: str) -> None:
    form, reasoned = OutputFormat("hermes", "think"), set[bool]()
    for seed in range(12):
        answer = grammars.json_schema(SCHEMAS["get_all"])
        grammar = form.behind_reasoning("assistant\n", answer, tokenizer(kind).token_to_id)
        assert grammar is not None
        text = walk(kind, grammar, seed)
        reasoning, content, calls = parse(form, text, "assistant\n", forced=False)
        assert not calls
        validate([("get_all", content)])
        assert text.startswith("<think>") or not reasoning
        reasoned.add(bool(reasoning))
        forced = form.forced_calls("assistant\n", rules(kind))
        validate(parse(form, walk(kind, forced, seed), "assistant\n", forced=True)[2])
    assert reasoned == {True, False}
    assert (
        form.behind_reasoning("assistant\n", answer, tokenizer("text").token_to_id) is None
    )  # its tags may be content


def test_forced_calls_come_behind_the_reasoning() -> None:
    form = OutputFormat("hermes", "think")
    for seed in range(4):
        text = walk("special", form.forced_calls("<think>\n", rules("special")), seed)
        _, content, calls = parse(form, text, "<think>\n", forced=True)
        assert not content
        assert calls
        validate(calls)


def test_comments_in_schemas_need_no_room_and_too_many_schemas_are_refused() -> None:
    schemas = {f"tool{index}": SCHEMAS["get_weather"] for index in range(128)}
    token_id = tokenizer("special").token_to_id
    check(OutputFormat("hermes").forced_calls("", CallRules(schemas, True, token_id)))
    large = {name: {"enum": [name * 200]} for name in schemas}
    with pytest.raises(GrammarError, match="at most"):
        OutputFormat("hermes").forced_calls("", CallRules(large, True, token_id))

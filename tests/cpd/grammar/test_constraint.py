"""Forced tokens, and endings before the limit: what they are, and that they follow from the tokens so far."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cpd.grammar import ending
from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import CompiledGrammar, Vocabulary, check
from cpd.grammar.constraint import TokenConstraint
from cpd.grammar.grammar import Grammar

CHECKPOINT = Path(__file__).resolve().parents[3] / "models" / "tiny" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
EOS, OTHER_STOP = 0, 100
MOST = 16

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 3},
        "number": {"type": "integer", "minimum": 10, "exclusiveMaximum": 2000},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
    },
    "required": ["street", "number", "zip"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "strings": {"type": "array", "items": {"type": "string"}},
    "any": {"type": "object"},
    "nested": {
        "type": "object",
        "properties": {"people": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1}},
        "required": ["people"],
        "$defs": {
            "person": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "address": ADDRESS, "friends": {"type": "array"}},
                "required": ["name", "address"],
            }
        },
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    },
    "formats": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "when": {"type": "string", "format": "date-time"},
            "mail": {"type": "string", "format": "email"},
            "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)+$"},
            "code": {"type": "string", "pattern": r"^\{[A-Z]+\}$"},
        },
        "required": ["id", "when", "mail", "slug", "code"],
    },
    "choice": {
        "anyOf": [
            {"type": "null"},
            {"enum": ["red", "green", 7, None]},
            {"type": "array", "items": ADDRESS, "minItems": 2},
            {"type": "boolean"},
        ]
    },
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.of_checkpoint(CHECKPOINT, TOKENIZER.get_vocab_size())


def allowed(constraint: TokenConstraint) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    assert not constraint.error, constraint.error
    return [int(token) for token in np.flatnonzero(bits)]


def draw(constraint: TokenConstraint, seed: int, position: int) -> int:
    """A random allowed token: the same for the same state, seed and position, as when sampling."""
    return random.Random(seed << 20 | position).choice(allowed(constraint))


def output(
    constraint: TokenConstraint, seed: int, limit: int, most: int = MOST, emitted: list[int] | None = None
) -> list[int]:
    """The tokens of an output of at most `limit` tokens, after those that were emitted."""
    tokens = list(emitted or [])
    while len(tokens) < limit and EOS not in tokens:
        more = constraint.advance(draw(constraint, seed, len(tokens)), most)
        assert more, constraint.error
        tokens += more
    return tokens


def compiled(vocabulary: Vocabulary, schema: Any) -> CompiledGrammar:
    return vocabulary.compile(grammars.json_schema(schema))


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode([token for token in tokens if token != EOS], skip_special_tokens=False))


def assert_valid(tokens: list[int], schema: Any) -> None:
    assert tokens[-1] == EOS
    importlib.import_module("jsonschema").validate(json.loads(text_of(tokens)), schema)


# ---- forced tokens ----


def test_the_only_text_that_may_follow_comes_with_the_token_before_it(vocabulary: Vocabulary) -> None:
    sentence = "hello world, this is the only way to go on"
    constraint = vocabulary.compile(grammars.regex(f"(a|b){sentence}!?")).constraint([EOS])
    first = TOKENIZER.encode("a").ids
    got = constraint.advance(first[0], 100)
    assert len(got) > 5
    assert ("a" + sentence).startswith(text_of(got))
    assert got == TOKENIZER.encode("a" + sentence).ids[: len(got)]  # as the tokenizer splits it
    assert len("a" + sentence) - len(text_of(got)) < 8  # what is left may be part of a longer token


def test_a_limit_stops_a_run_and_the_mask_forces_the_rest(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile(grammars.regex("(a|b)one two three four five six!?"))
    start = TOKENIZER.encode("b").ids[0]
    whole = grammar.constraint([EOS]).advance(start, 100)
    constraint = grammar.constraint([EOS])
    tokens = constraint.advance(start, 3)
    assert len(tokens) == 3
    while len(tokens) < len(whole):
        (forced,) = allowed(constraint)
        tokens += constraint.advance(forced, 1)
    assert tokens == whole
    assert constraint.forced == []


def test_an_output_that_is_complete_ends_at_once(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile(grammars.choice(["yes, it is", "no"]))
    tokens = grammar.constraint([OTHER_STOP, EOS]).advance(TOKENIZER.encode("n").ids[0], 100)
    assert (text_of(tokens), tokens[-1]) == ("no", EOS)  # the model's own, not that of the request
    assert grammar.constraint([OTHER_STOP]).advance(TOKENIZER.encode("n").ids[0], 100)[-1] == OTHER_STOP


def test_a_token_that_ends_outputs_is_not_forced_within_one(vocabulary: Vocabulary) -> None:
    sentence = "hello world, this is the only way"
    within = TOKENIZER.encode("a" + sentence).ids[3]
    constraint = vocabulary.compile(grammars.regex(f"a{sentence}!?")).constraint([EOS, within])
    assert within not in constraint.advance(TOKENIZER.encode("a").ids[0], 100)
    constraint.mask()
    assert "no token to go on" in constraint.error


def test_another_split_into_tokens_is_accepted_where_one_is_forced(vocabulary: Vocabulary) -> None:
    """An output may go on that began where nothing was forced."""
    constraint = vocabulary.compile(grammars.regex("(a|b)hello world")).constraint([EOS])
    assert len(constraint.advance(TOKENIZER.encode("a").ids[0], 1)) == 1
    assert constraint.forced[0] != (letter := TOKENIZER.encode("h").ids[0])
    assert constraint.accept(letter)
    assert text_of([letter, *constraint.forced]).startswith("hello")


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.ebnf("start: A B\nA: /a+/\nB: /a+/"),
        grammars.ebnf('%llguidance {"no_forcing": false}\nstart: "a" start'),
        grammars.ebnf('start: A B\n%llguidance {"no_forcing": false}\nA: /a+/\nB: /a+/'),
        grammars.ebnf('%import common.INT %llguidance {"no_forcing": false}\nstart: A B\nA: /a+/\nB: /a+/'),
        grammars.ebnf('start: %lark {\n%llguidance {"no_forcing": false}\nstart: A B\nA: /a+/\nB: /a+/\n}'),
        grammars.ebnf('root ::= "b" root | "a"'),
        grammars.regex("(((a{99}){99}){99})b?"),
        grammars.json_schema({"type": "string", "pattern": "^(((a{99}){99}){99})b?$"}),
    ],
)
def test_a_text_without_end_is_not_forced(vocabulary: Vocabulary, grammar: Grammar) -> None:
    """llguidance would follow it for ever."""
    check(grammar)
    constraint = vocabulary.compile(grammar).constraint([EOS]).fork(100)
    assert len(output(constraint, 1, 20)) < 100
    assert len(constraint.forced) < 2


# ---- endings ----


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("spared", [0, 1, 5, 60])
def test_every_document_ends_before_its_limit_and_is_valid(vocabulary: Vocabulary, name: str, spared: int) -> None:
    grammar = compiled(vocabulary, SCHEMAS[name])
    assert grammar.shortest is not None
    limit = grammar.shortest + spared
    for seed in range(8):
        tokens = output(grammar.constraint([EOS]).fork(limit), seed, limit)
        assert len(tokens) <= limit
        assert_valid(tokens, SCHEMAS[name])


def test_a_document_that_does_not_fit_is_cut(vocabulary: Vocabulary) -> None:
    tokens = output(compiled(vocabulary, SCHEMAS["formats"]).constraint([EOS]).fork(20), 1, 20)
    assert (len(tokens), EOS in tokens) == (20, False)


@pytest.mark.parametrize("items", [10, 2000])  # of the latter, no ending is found when the grammar is compiled
def test_no_ending_is_looked_for_that_can_not_fit(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, items: int
) -> None:
    grammar = compiled(vocabulary, {"type": "array", "items": ADDRESS, "minItems": items})
    limit = 20 if items == 10 else 40
    assert limit < grammar.least <= (grammar.shortest or grammar.least)
    monkeypatch.setattr(ending.Endings, "find", lambda *_: pytest.fail("an ending was looked for"))
    assert len(output(grammar.constraint([EOS]).fork(limit), 1, limit)) == limit


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.regex("[a-f ]+"),
        grammars.regex("([a-z]{3}-)*[0-9]"),
        grammars.choice(["是的", "不是", "不知道"]),
        grammars.ebnf('start: "<" NAME ">" /[^<]*/ "</" NAME ">"\nNAME: /[a-z]+/'),
        grammars.ebnf('root ::= "[" (item ("," item)*)? "]"\nitem ::= "x" | "(" item ")"'),
    ],
)
def test_other_grammars_end_before_the_limit_too(vocabulary: Vocabulary, grammar: Grammar) -> None:
    for seed in range(8):
        assert output(vocabulary.compile(grammar).constraint([EOS]).fork(40), seed, 40)[-1] == EOS


def test_an_ending_is_only_taken_when_it_is_needed(vocabulary: Vocabulary) -> None:
    """Until then a limit changes nothing."""
    grammar = compiled(vocabulary, SCHEMAS["nested"])
    for seed in range(4):
        free = output(grammar.constraint([EOS]), seed, 150)
        limited = output(grammar.constraint([EOS]).fork(300), seed, 150)
        assert limited == free


def test_a_search_that_leads_nowhere_is_given_up_soon(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams of the batch wait for it."""
    constraint = vocabulary.compile(grammars.regex("(a|b)*a(a|b){40}")).constraint([EOS]).fork(32)
    searches: list[Any] = []
    run = ending._Search.run

    def counted(search: Any, most: int) -> ending.Ending:
        searches.append(search)
        return run(search, most)

    monkeypatch.setattr(ending._Search, "run", counted)
    output(constraint, 1, 32)
    assert searches
    assert max(search._tries for search in searches) < 1000


# ---- exactness ----


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("limit", [50, 120])
def test_an_output_goes_on_with_the_same_tokens_wherever_it_is_taken_up(
    vocabulary: Vocabulary, name: str, limit: int
) -> None:
    """Also within a run of forced tokens, within an ending, and one token at a time.

    The next tokens are compared wherever it is taken up, and all others up to the end at every tenth place.
    """
    grammar = compiled(vocabulary, SCHEMAS[name])
    for seed in range(3):
        whole = output(grammar.constraint([EOS]).fork(limit), seed, limit)
        assert output(grammar.constraint([EOS]).fork(limit), seed, limit, most=1) == whole
        emitted = grammar.constraint([EOS]).fork(limit)
        for place, token in enumerate(whole):
            end = len(whole) if place % 10 == seed else place + 1
            tokens = output(emitted.fork(), seed, end, emitted=whole[:place])
            assert len(tokens) >= end
            assert tokens == whole[: len(tokens)]
            assert emitted.accept(token)


def test_a_copy_goes_its_own_way(vocabulary: Vocabulary) -> None:
    constraint = compiled(vocabulary, SCHEMAS["nested"]).constraint([EOS]).fork(80)
    constraint.advance(draw(constraint, 1, 0), MOST)
    copies = [constraint.fork() for _ in range(6)]
    outputs = [output(copy, seed, 60) for seed, copy in enumerate(copies)]
    assert len({tuple(tokens) for tokens in outputs}) > 1
    again = [output(constraint.fork(), seed, 60) for seed in range(6)]
    assert again == outputs


def test_looking_for_an_ending_changes_nothing(vocabulary: Vocabulary) -> None:
    for name in ("nested", "tree"):
        constraint = compiled(vocabulary, SCHEMAS[name]).constraint([EOS]).fork(100)
        position = 0
        while position < 90:
            mask = constraint.mask().copy()
            replacement = constraint.replacement()
            assert constraint.replacement() == replacement
            assert (constraint.mask() == mask).all()
            position += len(constraint.advance(draw(constraint, 3, position), MOST))

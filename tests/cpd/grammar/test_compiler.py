"""Grammars are checked, compiled and followed; what is too much is refused."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import MAX_RULES, Vocabulary, check
from cpd.grammar.constraint import TokenConstraint
from cpd.grammar.grammar import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_EBNF_BYTES,
    MAX_EXPRESSION_BYTES,
    Grammar,
    GrammarError,
    GrammarKind,
)

CHECKPOINT = Path(__file__).resolve().parents[3] / "models" / "tiny" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS, OTHER_STOP = 0, 100

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.of_checkpoint(CHECKPOINT, VOCAB_SIZE)


def allowed(constraint: TokenConstraint, *, may_end: bool = True) -> set[int]:
    bits = np.unpackbits(constraint.mask(may_end=may_end).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(constraint: TokenConstraint, seed: int, limit: int = 2000) -> list[int]:
    """Random allowed tokens up to the end token, without it."""
    rng = random.Random(seed)
    tokens: list[int] = []
    for _ in range(limit):
        token = rng.choice(sorted(allowed(constraint)))
        assert constraint.accept(token), constraint.error
        if token == EOS:
            return tokens
        tokens.append(token)
    raise AssertionError("it does not end")


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(20))
def test_every_way_through_a_schema_is_a_valid_document(vocabulary: Vocabulary, seed: int) -> None:
    constraint = vocabulary.compile(grammars.json_schema(PERSON)).constraint([EOS])
    importlib.import_module("jsonschema").validate(json.loads(text_of(walk(constraint, seed))), PERSON)


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (grammars.regex("(yes|no)!?"), {"yes", "no", "yes!", "no!"}),
        (grammars.choice(["a", 'b\n"é🙂', "\\d+"]), {"a", 'b\n"é🙂', "\\d+"}),
        (grammars.ebnf('start: "x" ("y" | "z")'), {"xy", "xz"}),
        (grammars.ebnf('root ::= "x" ("y" | "z")'), {"xy", "xz"}),
        (grammars.json_schema({"const": None}), {"null"}),
    ],
)
def test_each_kind_of_grammar_allows_its_texts_and_no_others(
    vocabulary: Vocabulary, grammar: Grammar, texts: set[str]
) -> None:
    check(grammar)
    compiled = vocabulary.compile(grammar)
    assert {text_of(walk(compiled.constraint([EOS]), seed)) for seed in range(60)} == texts


def test_an_output_ends_only_where_its_grammar_may_end_and_with_any_of_its_end_tokens(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile(grammars.regex("ab?")).constraint([EOS, OTHER_STOP, 1 << 30])
    assert allowed(constraint).isdisjoint({EOS, OTHER_STOP})
    assert [constraint.may_end] == [False]
    a, b = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
    assert constraint.accept(a)
    assert [constraint.may_end] == [True]
    assert allowed(constraint) == {b, EOS, OTHER_STOP}
    assert allowed(constraint, may_end=False) == {b}
    assert constraint.accept(b)
    assert allowed(constraint) == allowed(constraint, may_end=False) == {EOS}  # nothing else is possible
    assert constraint.accept(OTHER_STOP)


def test_the_tokenizers_own_end_token_does_not_end_an_output_with_other_end_tokens(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile(grammars.regex("a?")).constraint([OTHER_STOP])
    assert EOS not in allowed(constraint)
    assert OTHER_STOP in allowed(constraint)


def test_a_token_that_is_not_allowed_is_refused_for_good(vocabulary: Vocabulary) -> None:
    for token in (EOS, TOKENIZER.encode("x").ids[0]):
        constraint = vocabulary.compile(grammars.regex("ab?")).constraint([EOS])
        assert not constraint.accept(token)
        assert str(token) in constraint.error
        assert not constraint.may_end
        assert not constraint.accept(TOKENIZER.encode("a").ids[0])
        assert len(allowed(constraint)) >= VOCAB_SIZE  # of no use, but something can be sampled


def test_a_fork_goes_its_own_way(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile(grammars.regex("(ab|ba)")).constraint([EOS])
    a, b = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
    other = constraint.fork()
    assert constraint.accept(a)
    assert other.accept(b)
    assert allowed(constraint) == {b}
    assert allowed(other) == {a}


def test_a_model_may_have_more_logits_than_tokens_or_fewer(vocabulary: Vocabulary) -> None:
    text = (CHECKPOINT / "tokenizer.json").read_text()
    for size in (VOCAB_SIZE + 77, VOCAB_SIZE - 77):
        constraint = Vocabulary(text, size, [EOS]).compile(grammars.regex("[a-z]+")).constraint([EOS])
        expected = allowed(vocabulary.compile(grammars.regex("[a-z]+")).constraint([EOS]))
        assert allowed(constraint) == {token for token in expected if token < size}


def test_a_grammar_without_an_end_token_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        vocabulary.compile(grammars.regex("a")).constraint([])


def test_a_tokenizer_with_a_token_that_is_too_long_is_refused() -> None:
    """llguidance panics: that is no Exception, and would end the worker."""
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a" * 3000] = VOCAB_SIZE
    with pytest.raises(GrammarError, match="tokenizer"):
        Vocabulary(json.dumps(tokenizer), VOCAB_SIZE + 1)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="can't be read"):
        Vocabulary.of_checkpoint(tmp_path, 100)
    with pytest.raises(GrammarError, match="tokenizer"):
        Vocabulary("{}", 100)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: grammars.json_schema({"not": {"type": "string"}}), r'"not".*leave them out'),
        (lambda: grammars.json_schema({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        (lambda: grammars.json_schema({"minProperties": 2}), "may repeat"),
        (lambda: grammars.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "without end"),
        (lambda: grammars.regex(r"[^\x00-\x{10FFFF}]"), "contradicts itself"),
        (lambda: grammars.json_schema({"items": {"required": ["a"], "minProperties": 3}}), "at most 2"),
        (lambda: grammars.json_schema({"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
        (lambda: grammars.json_schema({"type": "foo"}), "foo"),
        (lambda: grammars.json_schema({"$ref": "https://example.com/schema"}), "not present in a registry"),
        (lambda: grammars.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda: grammars.json_schema("[1]"), "object"),
        (lambda: grammars.json_schema("{"), "not valid JSON"),
        (lambda: grammars.json_schema('{"minimum": NaN}'), "a number that JSON does not have"),
        (lambda: grammars.json_schema('{"maximum": 1e999}'), "a number that JSON does not have"),
        (lambda: grammars.json_schema({"enum": ["x" * 500] * 150}), f"at most {MAX_BYTES}"),
        (lambda: grammars.json_schema({"description": "x" * (1 << 20)}), f"at most {MAX_BYTES}"),
        (lambda: grammars.json_schema({"const": "x" * 5000}), f"at most {MAX_EXPRESSION_BYTES}"),
        (lambda: grammars.json_schema({"properties": {"x" * 5000: {}}}), f"at most {MAX_EXPRESSION_BYTES}"),
        (lambda: grammars.json_schema({"pattern": "é" * 2500}), f"at most {MAX_EXPRESSION_BYTES}"),
        (lambda: grammars.regex("x" * 5000), f"at most {MAX_EXPRESSION_BYTES}"),
        (lambda: grammars.choice(["x" * 5000]), f"at most {MAX_EXPRESSION_BYTES}"),
        (lambda: grammars.json_schema('{"enum": ["' + "x" * (1 << 20) + '"]}'), f"at most {MAX_BYTES}"),
        (lambda: grammars.regex(""), "empty"),
        (lambda: grammars.regex("("), "unclosed group"),
        (lambda: grammars.regex("(?=a)b"), "look ahead"),
        (lambda: grammars.regex(r"\bfoo"), r"no \\b"),
        (lambda: grammars.regex(r"(a)\1"), "backreferences"),
        (lambda: grammars.regex("(" * 3000), "regex"),
        (lambda: grammars.regex("\ud800"), "Unicode"),
        (lambda: grammars.choice([]), f"1 to {MAX_CHOICES}"),
        (lambda: grammars.choice(["a"] * (MAX_CHOICES + 1)), f"1 to {MAX_CHOICES}"),
        (lambda: grammars.choice(["a", ""]), "empty"),
        (lambda: grammars.ebnf(" "), "empty"),
        (lambda: grammars.ebnf('start: "' + "x" * 20000 + '"'), f"at most {MAX_EBNF_BYTES}"),
        (lambda: grammars.ebnf("start: nothing"), "nothing"),
        (lambda: grammars.ebnf(f"start: <[{'9' * 5000}]>"), "number too large"),
        (lambda: grammars.ebnf(f"start: /a{{{'9' * 5000}}}/"), "invalid regex"),
        (lambda: grammars.ebnf('start: "a"\n('), r"2\(1\)"),  # the line that the client wrote
        (lambda: grammars.ebnf("root ::= " + "(" * 15000), "nested|read"),
        (lambda: grammars.ebnf("start: " + "(" * 15000), "nested"),
        (lambda: grammars.ebnf("start: a\n" + "".join(f"a{i}: a\n" for i in range(1500))), f"at most {MAX_RULES}"),
    ],
)
def test_what_can_not_be_used_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        check(make())
    assert len(str(caught.value)) < 600


def test_a_number_of_any_length_may_be_in_a_comment() -> None:
    check(grammars.json_schema({"type": "object", "description": "{" + "9" * 5000}))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_the_depth_of_a_schema_is_limited() -> None:
    check(grammars.json_schema(nested(MAX_DEPTH)))
    with pytest.raises(GrammarError, match=f"more than {MAX_DEPTH} levels"):
        check(grammars.json_schema(nested(MAX_DEPTH + 1)))


def chain(number: int, link: Any, end: Any) -> Grammar:
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(number)} | {f"a{number}": end}
    return grammars.json_schema({"$defs": definitions, "$ref": "#/$defs/a0"})


BOMBS = {
    "long repetitions": grammars.regex("(?:(?:(?:x{0,100}){0,100}){0,100}){0,100}"),
    "backtracking": grammars.regex("(a|b)*a(a|b){200}"),
    "optional letters": Grammar(GrammarKind.REGEX, "a?" * 5000 + "a" * 5000),
    "many alternatives": grammars.ebnf("root ::= " + " | ".join(['"a"'] * 2500)),
    "terminals that double": grammars.ebnf(
        "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(200)) + 'A200: "x"'
    ),
    "chain of allOf": chain(1200, lambda ref: {"allOf": [ref]}, {"type": "string"}),
    "chain of properties": chain(1000, lambda ref: {"properties": {"a": ref}}, {"type": "string"}),
    "doubling": chain(100, lambda ref: {"allOf": [ref, {"anyOf": [ref, ref]}]}, {"type": "string"}),
    "endless": grammars.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "large enum": grammars.json_schema({"enum": [{"a": i} for i in range(4000)]}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_neither_crashes_nor_hangs(vocabulary: Vocabulary, name: str) -> None:
    try:
        check(BOMBS[name])
        constraint = vocabulary.compile(BOMBS[name]).constraint([EOS])
    except GrammarError:
        return
    rng = random.Random(1)
    for _ in range(20):
        choices = sorted(allowed(constraint))
        if constraint.error or (token := rng.choice(choices)) == EOS:
            break
        constraint.accept(token)


def test_equal_grammars_have_equal_digests() -> None:
    assert grammars.regex("a").digest == grammars.regex("a").digest
    assert grammars.regex("a").digest != grammars.regex("b").digest
    assert grammars.regex("a").digest != grammars.ebnf("a").digest
    assert grammars.json_schema({"type": "null"}).digest == grammars.json_schema('{ "type": "null" }').digest

"""Pieces of grammars in Lark's notation."""

import json
from typing import Any

import pytest

from cpd.grammar import grammar as grammars
from cpd.grammar import lark
from cpd.grammar.compiler import check
from cpd.grammar.grammar import MAX_BYTES, GrammarError


def test_comments_are_left_out_of_schemas_and_nothing_else() -> None:
    kept: dict[str, Any] = {
        "properties": {"description": {"const": {"title": "x"}}, "title": {"enum": [{"description": "x"}, "title"]}},
        "required": ["title", "description"],
    }
    commented = {"title": "x", "$comment": "x", **kept, "anyOf": [{"description": "x", "type": "object"}]}
    assert lark.without_comments(commented) == kept | {"anyOf": [{"type": "object"}]}


def test_a_schema_can_not_weaken_its_own_rules() -> None:
    document = lark.json_document({"not": {}, "x-guidance": {"lenient": True}})
    assert json.loads(document.removeprefix("%json "))["x-guidance"] == lark.JSON_OPTIONS
    with pytest.raises(GrammarError, match='"not"'):
        check(lark.grammar([f"start: {document}"]))


@pytest.mark.parametrize("pattern", ["a/b", r"\/", r"\\/", "a\nb", r"\\", "[/\n]", "é", r"\n#//"])
def test_every_regular_expression_can_be_part_of_a_grammar(pattern: str) -> None:
    check(lark.grammar([f"start: {lark.expression(grammars.regex(pattern))} TAIL", 'TAIL: "x"']))


def test_the_rules_of_a_grammar_are_on_lines_of_their_own_whatever_is_in_its_texts() -> None:
    answer = grammars.choice(["a\nb", "\u2028", "start: x"])
    schema = lark.json_document({"const": "\u2028\x85\n::="})
    made = lark.grammar([f"start: {lark.expression(answer)} {schema}"])
    assert len(made.text.splitlines()) == 2  # the first one is an option
    check(made)


def test_a_large_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="at most"):
        lark.grammar(['start: "' + "x" * MAX_BYTES + '"'])

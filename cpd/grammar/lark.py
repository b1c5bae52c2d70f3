"""Builds grammars in llguidance's variant of Lark's notation, from rules and from other grammars."""

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cpd.grammar.grammar import MAX_BYTES, Grammar, GrammarError, GrammarKind, json_schema

if TYPE_CHECKING:  # only the types of the library have it
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r" |\n {0,16}"
"""White space between the tokens of a JSON document: a space, or a new line with its indentation. With more freedom,
weak models fill their outputs with it."""

JSON_OPTIONS: "JsonCompileOptions" = {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
"""llguidance's options of JSON schemas: what can't be enforced is an error."""

FORCING, NOT_FORCING = ('%llguidance {"no_forcing": ' + value + "}" for value in ("false", "true"))
"""Options of a grammar, of which the last ones count: whether llguidance follows a text that is the only one at once.
It does so without a limit, and some grammars have no end: in one of two rules that are both `/a+/`, the first one takes
every `a`."""

_COMMENTS = frozenset({"description", "title", "$comment"})
_VALUES = frozenset({"const", "enum"})
"""Members of a schema that hold values of the document."""


def grammar(rules: Iterable[str]) -> Grammar:
    """Makes a grammar of rules, each on one line; one is named `start`.

    No text may be without an end by the rules alone: what it forces is followed.

    Raises:
        GrammarError: It is too large.
    """
    text = "\n".join([FORCING, *rules])
    if len(text) > MAX_BYTES:
        raise GrammarError(f"the grammar has {len(text)} bytes; at most {MAX_BYTES} are allowed")
    return Grammar(GrammarKind.EBNF, text)


def literal(text: str) -> str:
    """Returns the expression of a text. A token of the tokenizer with this text is not part of it: see `token`."""
    return json.dumps(text)


def token(token_id: int) -> str:
    """Returns the expression of a token. Added tokens of a tokenizer, such as `<tool_call>`, are no text."""
    return f"<[{token_id}]>"


def marker_tokens(grammar: Grammar) -> list[int]:
    """Returns the ids of the `token` expressions of a grammar, in their order."""
    if grammar.kind is not GrammarKind.EBNF:
        return []
    return list(dict.fromkeys(int(token_id) for token_id in re.findall(r"<\[(\d{1,10})\]>", grammar.text)))


def text_without(text: str) -> str:
    """Returns the expression of a terminal: any text but an empty one, in which `text` is not."""
    return f"/(?s:.+)/ & ~/(?s:.*){_escaped(text)}(?s:.*)/"


def text_up_to(text: str) -> str:
    """Returns the expression of a lazy rule: any text that ends with the first `text`."""
    return f"/(?s:.*){_escaped(text)}/"


def json_document(schema: dict[str, Any]) -> str:
    """Returns the expression of the JSON documents that are valid by a schema.

    Raises:
        GrammarError: See `json_schema`.
    """
    checked = json.loads(json_schema(schema).text)
    return "%json " + json.dumps(checked | {"x-guidance": JSON_OPTIONS}, separators=(",", ":"))


def expression(grammar: Grammar) -> str | None:
    """Returns the expression of another grammar's outputs; None for one that has rules of its own.

    Raises:
        GrammarError: See `json_schema`.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_document(json.loads(grammar.text))
        case GrammarKind.REGEX:
            return "/" + re.sub(r"(\\.)|/|\n", _regex_part, grammar.text, flags=re.DOTALL) + "/"
        case GrammarKind.CHOICE:
            return "(" + " | ".join(map(literal, json.loads(grammar.text))) + ")"
        case GrammarKind.EBNF:
            return None


def without_comments(schema: Any) -> Any:
    """Returns a JSON schema without its comments for people, at any depth: they can be most of it."""
    if isinstance(schema, list):
        return [without_comments(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: item if key in _VALUES else without_comments(item)
        for key, item in schema.items()
        if not (key in _COMMENTS and isinstance(item, str))
    }


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _regex_part(match: re.Match[str]) -> str:
    """An escape stays; a slash and a line break, which would end the expression, become escapes."""
    escape: str | None = match[1]
    return escape or {"/": r"\/", "\n": r"\n"}[match[0]]

"""What a client asks of an output: a JSON schema, a regular expression, some choices or a grammar."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

from cpd.common.errors import CPDError

MAX_BYTES = 64 << 10
"""Limit on the size of a schema, and of all choices together."""

MAX_EXPRESSION_BYTES = 4 << 10
"""Limit on the size of a regular expression, a choice, and a text in a JSON schema. A mask takes time in proportion."""

MAX_EBNF_BYTES = 16 << 10
"""Limit on the size of a grammar in Lark's or llama.cpp's notation."""

MAX_DEPTH = 64
"""Limit on the levels of lists and objects in a JSON schema."""

MAX_CHOICES = 1024
"""Limit on the number of choices."""

_COMMENTS = frozenset({"description", "title", "$comment"})


class GrammarError(CPDError):
    """A grammar can't be used; the message says why, and what to do."""


class GrammarKind(IntEnum):
    """How the text of a grammar is to be read. The values are those of the wire's Grammar.Kind.

    JSON_SCHEMA is a JSON schema, REGEX a regular expression for the whole output, CHOICE a JSON list of strings, and
    EBNF a grammar in Lark's or llama.cpp's (GBNF) notation.
    """

    JSON_SCHEMA = 1
    REGEX = 2
    CHOICE = 3
    EBNF = 4


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar, not yet checked. `cpd/grammar/compiler.py` checks and compiles it."""

    kind: GrammarKind
    text: str

    @property
    def digest(self) -> bytes:
        """Equal for equal grammars. 16 bytes."""
        return blake2b(bytes([self.kind]) + self.text.encode(), digest_size=16).digest()


def json_schema(schema: dict[str, Any] | str) -> Grammar:
    """Makes the grammar of the JSON documents that are valid by a schema.

    Args:
        schema: The schema, or its JSON text.

    Raises:
        GrammarError: It is no object, too large or nested too deeply, or has a text that is too long or a number that
            JSON does not have.
    """
    if isinstance(schema, str):
        _check_size(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    _check_schema(schema)
    try:
        text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise GrammarError("the schema has a number that JSON does not have: NaN, or one too large") from None
    return _grammar(GrammarKind.JSON_SCHEMA, text)


def regex(pattern: str) -> Grammar:
    """Makes the grammar of the texts that a regular expression matches as a whole.

    Raises:
        GrammarError: It is empty or too large.
    """
    if not pattern:
        raise GrammarError("the regular expression is empty")
    _check_size(pattern, MAX_EXPRESSION_BYTES)
    return _grammar(GrammarKind.REGEX, pattern)


def choice(texts: Sequence[str]) -> Grammar:
    """Makes the grammar of some texts.

    Raises:
        GrammarError: There are none, one is empty, or they are too many or too large.
    """
    if not 0 < len(texts) <= MAX_CHOICES:
        raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices, not {len(texts)}")
    if not all(texts):
        raise GrammarError("a choice is empty")
    for text in texts:
        _check_size(text, MAX_EXPRESSION_BYTES)
    return _grammar(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))


def ebnf(text: str) -> Grammar:
    """Makes a grammar from Lark's or llama.cpp's notation. Options of llguidance in the first line are left out.

    Raises:
        GrammarError: It is empty or too large.
    """
    if not text.strip():
        raise GrammarError("the grammar is empty")
    _check_size(text, MAX_EBNF_BYTES)
    return _grammar(GrammarKind.EBNF, re.sub(r"^\s*%llguidance.*", "%llguidance {}", text))


def _grammar(kind: GrammarKind, text: str) -> Grammar:
    _check_size(text)
    return Grammar(kind, text)


def _check_size(text: str, limit: int = MAX_BYTES) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError("its text is not valid Unicode") from None
    if size > limit:
        raise GrammarError(f"a text has {size} bytes; at most {limit} are allowed")


def _check_schema(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        found = [item for value in level for item in _items(value)]
        for text in (item for item in found if isinstance(item, str)):
            _check_size(text, MAX_EXPRESSION_BYTES)
        for value in level:
            if isinstance(value, dict):
                _check_min_properties(value)
        level = [item for item in found if isinstance(item, dict | list)]
        if not level:
            return
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")


def _check_min_properties(schema: dict[str, Any]) -> None:
    """Raises GrammarError if an object could have a name twice, and so fewer properties than were counted."""
    least, required = schema.get("minProperties"), schema.get("required")
    names = len(required) if isinstance(required, list) else 0
    are_free = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if isinstance(least, int) and least > names + 1 and are_free:
        raise GrammarError(
            f"minProperties: {least} can't be enforced, because names that are not in 'required' may repeat; "
            f"at most {names + 1} is possible here"
        )


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    """Returns the items of a part of a schema, and names of properties, but no comments for people."""
    if isinstance(value, list):
        return value
    return [*value, *(item for key, item in value.items() if not (key in _COMMENTS and isinstance(item, str)))]

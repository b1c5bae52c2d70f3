"""What a client asks of an output: a JSON schema, a regular expression, some choices or a grammar."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

from cpd.common.errors import CPDError

MAX_BYTES = 64 << 10
"""Limit on the size of a grammar's text."""

MAX_DEPTH = 64
"""Limit on the levels of lists and objects in a JSON schema."""

MAX_CHOICES = 1024
"""Limit on the number of choices."""


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
        GrammarError: It is no object, too large or nested too deeply.
    """
    if isinstance(schema, str):
        _check_size(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    _check_depth(schema)
    return _grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


def regex(pattern: str) -> Grammar:
    """Makes the grammar of the texts that a regular expression matches as a whole.

    Raises:
        GrammarError: It is empty or too large.
    """
    if not pattern:
        raise GrammarError("the regular expression is empty")
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
    return _grammar(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))


def ebnf(text: str) -> Grammar:
    """Makes a grammar from Lark's or llama.cpp's notation.

    Raises:
        GrammarError: It is empty or too large.
    """
    if not text.strip():
        raise GrammarError("the grammar is empty")
    return _grammar(GrammarKind.EBNF, text)


def _grammar(kind: GrammarKind, text: str) -> Grammar:
    _check_size(text)
    return Grammar(kind, text)


def _check_size(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError("its text is not valid Unicode") from None
    if size > MAX_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_BYTES} are allowed")


def _check_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        items = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for each in items for item in each if isinstance(item, dict | list)]
        if not level:
            return
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")

"""The input of a tool call: JSON that strict parsers take, complete or cut."""

import json
import re
from typing import Any

import orjson
from pydantic_core import from_json

_PART = re.compile(r'[^"\\\x00-\x1f]+|.', re.DOTALL)


class StrictJson:
    """Escapes the line breaks in the strings of a JSON text that arrives in pieces.

    Models write them, and the parsers of tool calls accept them, but no other parser does.
    """

    def __init__(self) -> None:
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> str:
        """Returns the next piece."""
        return "".join(map(self._strict, _PART.findall(text)))

    def _strict(self, part: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif part == '"':
            self._in_string = not self._in_string
        elif part == "\\":
            self._is_escaped = True
        elif self._in_string and part < " ":
            return json.dumps(part)[1:-1]
        return part


def tool_input(text: str) -> orjson.Fragment:
    """Returns the input of a call as JSON: `text` as the model wrote it, or what came of it before it was cut."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return orjson.Fragment(json.dumps(_begun(text)))
    return orjson.Fragment(text)


def _begun(text: str) -> dict[str, Any]:
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

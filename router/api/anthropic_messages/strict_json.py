"""Makes JSON that models write acceptable to strict parsers."""

import json
import re

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

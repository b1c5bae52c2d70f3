"""Makes JSON that models write acceptable to strict parsers."""

import json
import re
from string import ascii_letters, digits

_PART = re.compile(r'[^"\\\x00-\x1f]+|.', re.DOTALL)

_SCALAR = ascii_letters + digits + "+-."
"""The characters of numbers, `true`, `false` and `null`."""


class StrictJson:
    """Passes on the JSON text of a tool call's arguments, which arrives in pieces.

    Line breaks in strings are escaped: models write them, and the parsers of tool calls accept them, but others don't.
    A number or word is held back until something follows it: where a call breaks off at one that is not JSON, such as
    `True`, it never comes out.
    """

    def __init__(self) -> None:
        self._in_string = False
        self._is_escaped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the next piece, which may be empty."""
        text = self._held + "".join(map(self._strict, _PART.findall(text)))
        end = len(text if self._in_string else text.rstrip(_SCALAR))
        self._held = text[end:]
        return text[:end]

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

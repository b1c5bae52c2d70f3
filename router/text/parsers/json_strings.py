"""JSON whose strings have line breaks, as models write it, becomes what all parsers take."""

import json
import re

_PART = re.compile(r'[^"\\\x00-\x1f]+|.', re.DOTALL)


class JsonStrings:
    """Passes on JSON text, which arrives in pieces. Line breaks and other control characters in strings are escaped.

    Attributes:
        in_string: The text so far ends within a string.
    """

    def __init__(self) -> None:
        self.in_string = False
        self._is_escaped = False

    def push(self, text: str) -> str:
        """Returns the next piece."""
        return "".join(map(self._strict, _PART.findall(text)))

    def _strict(self, part: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif part == '"':
            self.in_string = not self.in_string
        elif part == "\\":
            self._is_escaped = True
        elif self.in_string and part < " ":
            return json.dumps(part)[1:-1]
        return part

"""Follows the JSON object of a tool call as it arrives, character by character, without parsing anything twice.

```
state:    open → complete (behind the object's last brace) | broken (the next character can't be there)
expects:  VALUE      → STRING | SCALAR | FIRST_KEY (behind `{`) | FIRST_ITEM (behind `[`)
          FIRST_KEY, KEY → STRING → COLON → VALUE;    STRING ⇄ ESCAPE, HEX
          behind a value → NEXT → VALUE (in a list) | KEY (in an object) | NEXT (behind the closing bracket)
```
"""

import json
import re
from enum import Enum, auto
from typing import Literal

ARGUMENTS = ("arguments", "parameters")
"""Names of the member that has a call's arguments."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class _Expects(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # or the end of the list
    FIRST_KEY = auto()  # or the end of the object
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the object or list
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()


class CallScanner:
    """Reads one object.

    Unlike JSON, a string may have line breaks: models write them, and a call that has begun can't be taken back.

    Args:
        name: The call's name, if the object is its arguments. Otherwise the object has members for both.

    Attributes:
        state: `open`, `complete` or `broken`.
        name: The call's name; None until it is known.
        has_arguments: The arguments have begun.
    """

    def __init__(self, name: str | None = None) -> None:
        self.state: Literal["open", "complete", "broken"] = "open"
        self.name = name
        self.has_arguments = False
        self._only_arguments = name is not None
        self._expects = _Expects.VALUE
        self._closers: list[str] = []  # that end the open objects and lists
        self._captures = False  # what comes belongs to the arguments
        self._captured: list[str] = []
        self._is_key = False
        self._key: str | None = None  # of the object's own member
        self._string: list[str] = []  # of the object's own key, or name
        self._scalar = ""
        self._hex_digits = 0

    def push(self, text: str) -> int:
        """Reads on. Returns how many characters belong to the object."""
        position = 0
        while position < len(text) and self.state == "open":
            captured = self._captures
            end = self._read(text, position)
            if captured or self._captures:
                self._captured.append(text[position:end])
            position = end
        return position

    def take(self) -> str:
        """Returns the text of the arguments since the last call."""
        taken, self._captured = "".join(self._captured), []
        return taken

    @property
    def _is_outside(self) -> bool:
        """What comes is a member of the object itself."""
        return len(self._closers) == 1 and not self._only_arguments

    def _read(self, text: str, position: int) -> int:
        """Reads a character or a run of them. Returns the new position; the same one if this is no JSON, or unread."""
        char = text[position]
        match self._expects:
            case _Expects.STRING:
                return self._read_string(text, position)
            case _Expects.ESCAPE:
                self._keep(char)
                self._hex_digits = 4 * (char == "u")
                self._expects = _Expects.HEX if char == "u" else _Expects.STRING
                return position + 1 if char in '"\\/bfnrtu' else self._break(position)
            case _Expects.HEX:
                self._keep(char)
                self._hex_digits -= 1
                self._expects = _Expects.HEX if self._hex_digits else _Expects.STRING
                return position + 1 if char in "0123456789abcdefABCDEF" else self._break(position)
            case _Expects.SCALAR:
                if (end := _matched(_SCALAR, text, position)) > position:
                    self._scalar += text[position:end]
                    return end
                if _VALID_SCALAR.fullmatch(self._scalar) is None:
                    return self._break(position)
                self._expects = _Expects.NEXT
        if char in _SPACE:
            return position + 1
        return position + 1 if self._take(char) else self._break(position)

    def _read_string(self, text: str, position: int) -> int:
        if (end := _matched(_PLAIN, text, position)) > position:
            self._keep(text[position:end])
            return end
        if text[position] == "\\":
            self._keep("\\")
            self._expects = _Expects.ESCAPE
        elif self._is_key:
            self._expects = _Expects.COLON
            if self._is_outside:
                self._key = self._kept()
        else:
            self._expects = _Expects.NEXT
            if self._is_outside and self._key == "name":
                self.name = self._kept()
        return position + 1

    def _take(self, char: str) -> bool:
        """Takes a character outside of strings, numbers and white space. Returns False if it can't be there."""
        match self._expects:
            case _Expects.COLON if char == ":":
                self._expects = _Expects.VALUE
            case _Expects.FIRST_KEY | _Expects.KEY if char == '"':
                self._begin_string(is_key=True)
            case _Expects.FIRST_KEY if char == "}":
                self._close()
            case _Expects.FIRST_ITEM if char == "]":
                self._close()
            case _Expects.VALUE | _Expects.FIRST_ITEM:
                return self._begin_value(char)
            case _Expects.NEXT if char == self._closers[-1]:
                self._close()
            case _Expects.NEXT if char == ",":
                self._expects = _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
            case _:
                return False
        return True

    def _begin_value(self, char: str) -> bool:
        if not self._closers and char != "{":
            return False
        is_arguments = self._key in ARGUMENTS if self._is_outside else self._only_arguments and not self._closers
        if is_arguments:
            if char != "{" or self.has_arguments:
                return False
            self.has_arguments = self._captures = True
        if self._is_outside and self._key == "name" and (char != '"' or self.name is not None):
            return False
        match char:
            case "{":
                self._closers.append("}")
                self._expects = _Expects.FIRST_KEY
            case "[":
                self._closers.append("]")
                self._expects = _Expects.FIRST_ITEM
            case '"':
                self._begin_string(is_key=False)
            case _:
                self._scalar = char
                self._expects = _Expects.SCALAR
                return _matched(_SCALAR, char, 0) == 1
        return True

    def _begin_string(self, *, is_key: bool) -> None:
        self._is_key = is_key
        self._string = []
        self._expects = _Expects.STRING

    def _close(self) -> None:
        self._closers.pop()
        self._expects = _Expects.NEXT
        if len(self._closers) == (0 if self._only_arguments else 1):
            self._captures = False
        if not self._closers:
            self.state = "complete"

    def _break(self, position: int) -> int:
        self.state = "broken"
        return position

    def _keep(self, text: str) -> None:
        if self._is_outside:
            self._string.append(text)

    def _kept(self) -> str:
        string: str = json.loads('"' + "".join(self._string) + '"', strict=False)
        return string


def _matched(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Returns the end of the run at `position`."""
    match = pattern.match(text, position)
    return position if match is None else match.end()

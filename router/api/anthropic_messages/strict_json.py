"""Makes JSON that models write acceptable to strict parsers."""

from string import ascii_letters, digits

from router.text.parsers.json_strings import JsonStrings

_SCALAR = ascii_letters + digits + "+-."
"""The characters of numbers, `true`, `false` and `null`."""


class StrictJson:
    """Passes on the JSON text of a tool call's arguments, which arrives in pieces.

    A number or word is held back until something follows it: where a call breaks off at one that is not JSON, such as
    `True`, it never comes out.
    """

    def __init__(self) -> None:
        self._strings = JsonStrings()
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the next piece, which may be empty."""
        text = self._held + self._strings.push(text)
        end = len(text if self._strings.in_string else text.rstrip(_SCALAR))
        self._held = text[end:]
        return text[:end]

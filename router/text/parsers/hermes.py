"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

from cpd.grammar.lark import literal
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.tool_calls import SPACE, JsonCallParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Parses calls between tags. A missing closing tag is forgiven."""

    MARKERS = (_OPEN, _CLOSE)
    OPENING = _OPEN

    @classmethod
    def grammar(cls, calls: CallRules) -> list[str]:
        line = literal("\n")
        return [
            f"calls: {calls.several('call', line)}",
            f"call: {calls.marker(_OPEN)} {line} object {line} {calls.marker(_CLOSE)}",
            *calls.objects("arguments"),
        ]

    def _start(self) -> bool:
        return self._write_up_to(_OPEN) and self._go(self._opened)

    def _opened(self) -> bool:
        if not self._hold_space():
            return False
        return self._read_call(marked=True) if self._text[0] == "{" else self._no_call()

    def _no_call(self) -> bool:
        # what follows the tag may have another one
        self._text = self._held.removeprefix(_OPEN) + self._text
        self._held = ""
        self._write(_OPEN)
        return self._go(self._start)

    def _after_call(self) -> bool:
        rest = self._text.lstrip(SPACE)
        if rest.startswith(_CLOSE):
            self._text = rest.removeprefix(_CLOSE)
        elif _CLOSE.startswith(rest):
            return False
        return self._go(self._start)

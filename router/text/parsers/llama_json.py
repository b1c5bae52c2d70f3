"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}`, several separated by `;`.

The whole output is calls, or they follow `<|python_tag|>`. Without the tag, an object is a call only if there is a tool
with its name.
"""

from cpd.grammar.lark import literal
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.tool_calls import SPACE, JsonCallParser

_TAG = "<|python_tag|>"


class LlamaJsonParser(JsonCallParser):
    """Parses calls of which only the first may have a tag."""

    MARKERS = (_TAG,)

    @classmethod
    def grammar(cls, calls: CallRules) -> list[str]:
        tag = f"{calls.marker(_TAG)}? " if calls.is_token(_TAG) else ""
        return [f"calls: {tag}{calls.several('object', literal('; '))}", *calls.objects("parameters")]

    def _start(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            return self._read_call(marked=False)
        return self._no_call()

    def _outside(self) -> bool:
        return self._write_up_to(_TAG) and self._go(self._tagged)

    def _tagged(self) -> bool:
        if not self._hold_space():
            return False
        return self._read_call(marked=True) if self._text[0] == "{" else self._no_call()

    def _no_call(self) -> bool:
        self._write_held()
        return self._go(self._outside)

    def _after_call(self) -> bool:
        rest = self._text.lstrip(SPACE)
        separated = rest.startswith(";")
        rest = rest.removeprefix(";").lstrip(SPACE) if separated else rest
        if _TAG.startswith(rest):
            return False
        if rest.startswith(_TAG):
            self._hold(len(self._text) - len(rest) + len(_TAG))
            return self._go(self._tagged)
        if rest[0] == "{":
            self._hold(len(self._text) - len(rest))
            return self._read_call(marked=self._is_marked)
        return self._go(self._outside)

"""Plain JSON: the output is `{"name": …, "arguments": {…}}`, or a list of such objects. Their tools must exist."""

from collections.abc import Container

from cpd.grammar.lark import literal
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.tool_calls import JsonCallParser


class JsonParser(JsonCallParser):
    """Parses calls without any marker."""

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._is_list = False

    @classmethod
    def grammar(cls, calls: CallRules) -> list[str]:
        several = f" | {literal('[')} {calls.several('object', literal(', '))} {literal(']')}" if calls.many else ""
        return [f"calls: object{several}", *calls.objects("arguments")]

    def _start(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            return self._read_call(marked=False)
        if self._text[0] == "[":
            self._is_list = True
            self._hold(1)
            return self._go(self._in_list)
        return self._no_call()

    def _after_call(self) -> bool:
        return self._go(self._after_item if self._is_list else self._content)

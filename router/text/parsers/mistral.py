"""Mistral: `[TOOL_CALLS]` before a list of calls, or before each `name[ARGS]{…}` (with or without `[CALL_ID]id`)."""

import re
import secrets
import string
from collections.abc import Container

from cpd.grammar.lark import literal
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.tool_calls import JsonCallParser

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARS = 9
"""Length of an id, which the models' templates demand."""

_MAX_HEAD = 256
"""Maximum number of characters between `[TOOL_CALLS]` and the arguments."""

_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?")
_PART_OF_HEAD = re.compile(r"[\w.\-\[\]\s]*")


class MistralParser(JsonCallParser):
    """Parses both formats."""

    MARKERS = (_CALLS, _CALL_ID, _ARGS)
    OPENING = _CALLS

    @classmethod
    def grammar(cls, calls: CallRules) -> list[str]:
        opening = calls.marker(_CALLS)
        if calls.is_token(_ARGS):  # of models that write names
            return [f"calls: {calls.several(f'{opening} named', '')}", *calls.named(calls.marker(_ARGS))]
        objects = calls.several("object", literal(", "))
        return [
            f"calls: {opening} {literal(' ')}? {literal('[')} {objects} {literal(']')}",
            *calls.objects("arguments"),
        ]

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._is_list = False

    def _start(self) -> bool:
        return self._write_up_to(_CALLS) and self._go(self._marked)

    def _marked(self) -> bool:
        if not self._hold_space():
            return False
        self._is_list, self._is_marked = self._text[0] == "[", True
        if self._is_list:
            self._hold(1)
            return self._go(self._in_list)
        return self._read_call(marked=True) if self._text[0] == "{" else self._go(self._named)

    def _named(self) -> bool:
        head, brace, _ = self._text.partition("{")
        if not brace and len(head) < _MAX_HEAD and _PART_OF_HEAD.fullmatch(head):
            return False
        match = _HEAD.fullmatch(head) if brace and len(head) < _MAX_HEAD else None
        if match is None:
            return self._no_call()
        self._hold(len(head))
        return self._read_call(marked=True, name=match[1], id=match[2] or "")

    def _no_call(self) -> bool:
        # what follows the marker may have another one
        self._text = self._held.removeprefix(_CALLS) + self._text
        self._write(_CALLS if self._held.startswith(_CALLS) else "")
        self._held = ""
        return self._go(self._start)

    def _after_call(self) -> bool:
        return self._go(self._after_item if self._is_list else self._start)

    def _after_list(self) -> bool:
        return self._go(self._start)

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_CHARS))

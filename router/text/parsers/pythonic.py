"""Llama 3.2 and 4 in Python's syntax: the output is `[f(a=1, b="x"), g()]`, in Llama 4 after `<|python_start|>`.

Arguments are literals and given by name; a call is one only if there is a tool with its name. Each call is sent when
its parenthesis closes, with its arguments as JSON. Of a call that the output's limit cuts, the complete arguments are.
"""

import ast
import json
import re
import warnings
from collections.abc import Container
from typing import Any

from router.text.parsers.tool_calls import SPACE, ToolCallParser

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What Python's parser raises for texts that are no literals, or too deep or long."""


class PythonicParser(ToolCallParser):
    """Parses a list of calls."""

    MARKERS = (_START, _END)

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._scanned = 0  # characters of the call
        self._closers: list[str] = []  # that end the open brackets
        self._quote = ""  # of the open string
        self._commas: list[int] = []  # between arguments

    def _start(self) -> bool:
        if not self._hold_space() or (self._text != _START and _START.startswith(self._text)):
            return False
        if self._text.startswith(_START):
            self._hold(len(_START))
        return self._go(self._opened)

    def _opened(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] != "[":
            return self._go(self._content)
        self._hold(1)
        return self._go(self._between)

    def _between(self) -> bool:
        """Before a call."""
        if not self._hold_space():
            return False
        match = _NAME.match(self._text)
        if match is None:
            return self._go(self._content)
        if match.end() == len(self._text):
            return False
        if self._text[match.end()] != "(" or match[0] not in self._tools:
            return self._go(self._content)
        self._scanned, self._closers, self._quote, self._commas = match.end(), [], "", []
        return self._go(self._in_call)

    def _in_call(self) -> bool:
        text, position = self._text, self._scanned
        while position < len(text):
            char = text[position]
            if self._quote:
                if char == "\\":
                    if position + 1 == len(text):
                        break
                    position += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            elif char == "," and len(self._closers) == 1:
                self._commas.append(position)
            elif char == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    return self._parse(position + 1)
            position += 1
        self._scanned = position
        return False

    def _parse(self, end: int) -> bool:
        """The call ends before `end`."""
        call = self._text[:end]
        try:
            arguments = json.dumps(_keywords(call), ensure_ascii=False, allow_nan=False)
        except _ERRORS:
            return self._go(self._content)
        self._begin_call(call.partition("(")[0])
        self._write_arguments(arguments)
        self._text = self._text[end:]
        return self._go(self._after_call)

    def _after_call(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == ",":
            self._hold(1)
            return self._go(self._between)
        if self._text[0] == "]":
            self._held, self._text = "", self._text[1:]
            return self._go(self._closed)
        return self._go(self._content)

    def _closed(self) -> bool:
        rest = self._text.lstrip(SPACE)
        if rest.startswith(_END):
            self._text = rest.removeprefix(_END)
        elif _END.startswith(rest):
            return False
        return self._go(self._content)

    def _end(self, cut: bool) -> None:
        if self._state in (self._after_call, self._closed):
            return
        if cut and self._state == self._in_call:
            self._write_cut_call()
            return
        super()._end(cut)

    def _write_cut_call(self) -> None:
        complete = self._text[: self._commas[-1]] if self._commas else self._text.partition("(")[0] + "("
        try:
            arguments = json.dumps(_keywords(complete + ")"), ensure_ascii=False, allow_nan=False)
        except _ERRORS:
            self._content()
            return
        self._begin_call(complete.partition("(")[0])
        self._write_arguments(arguments.removesuffix("}"))


def _keywords(call: str) -> dict[str, Any]:
    """Returns the arguments of `f(a=1, …)`.

    Raises:
        SyntaxError, ValueError, TypeError, RecursionError, MemoryError: It is no call with literal keyword arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escapes in strings
        tree = ast.parse("_" + call[call.index("(") :], mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError("arguments without a name")
    names = [keyword.arg for keyword in tree.keywords if keyword.arg is not None]
    if len(set(names)) < len(tree.keywords):
        raise ValueError("arguments that are repeated or unpacked")
    return dict(zip(names, (ast.literal_eval(keyword.value) for keyword in tree.keywords), strict=True))

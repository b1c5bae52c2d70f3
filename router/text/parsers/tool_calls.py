"""The base of the parsers of tool calls: a state machine over the text that is not decided yet.

A call begins when its name and the start of its arguments have been read. Until then its text is held; if it turns out
to be no call, it is content. From then on the arguments are passed on as they come. If they are no JSON, they end there
and the rest is content: what was sent can't be taken back.

White space beside a call is layout, and part of nothing.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import ClassVar

from router.text.parsers.call_grammar import CallRules
from router.text.parsers.call_scanner import CallScanner
from router.text.parsers.events import CallArguments, CallStart, Content, Event
from router.text.parsers.json_strings import JsonStrings
from router.text.stops import overlap

SPACE = " \t\r\n"

_MAX_NAME = 256
"""Maximum length of a tool's name that the request does not have."""

Step = Callable[[], bool]
"""A state of a parser. Decides on the held text; returns False if it needs more, True if another state goes on."""


def call_id() -> str:
    """Returns an id for a call."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser(ABC):
    """Finds tool calls in one output.

    Args:
        tools: Names of the request's tools.

    Class attributes:
        MARKERS: Texts of the format that may be special tokens of the tokenizer.
    """

    MARKERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Container[str]) -> None:
        self._tools = tools
        self._text = ""  # not decided yet
        self._held = ""  # the start of what may become a call
        self._space = ""  # content, unless a call follows
        self._num_calls = 0
        self._strings = JsonStrings()  # of the last call's arguments
        self._events: list[Event] = []
        self._state: Step = self._start

    def push(self, text: str) -> list[Event]:
        """Adds text and returns what is certain now."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def flush(self, *, cut: bool) -> list[Event]:
        """Returns the rest, after the last text.

        Args:
            cut: The output ended at its limit, not by itself.
        """
        self._end(cut)
        if not self._num_calls and self._space:
            self._events.append(Content(self._space))
        return self._take()

    @abstractmethod
    def _start(self) -> bool:
        """The state at the beginning of an output."""

    def _end(self, cut: bool) -> None:
        """Decides on what is held at the end of an output."""
        self._write(self._held + self._text)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _go(self, state: Step) -> bool:
        self._state = state
        return True

    def _hold(self, count: int) -> None:
        """Holds the next characters until it is known whether they begin a call."""
        self._held += self._text[:count]
        self._text = self._text[count:]

    def _hold_space(self) -> bool:
        """Holds white space. Returns True if there is text behind it."""
        self._hold(len(self._text) - len(self._text.lstrip(SPACE)))
        return bool(self._text)

    def _write(self, text: str) -> None:
        """Writes content."""
        body = text.rstrip(SPACE)
        if body:
            self._events.append(Content(self._space + body))
            self._space = ""
        self._space += text[len(body) :]

    def _write_held(self) -> None:
        self._write(self._held)
        self._held = ""

    def _content(self) -> bool:
        """The state in which all the rest is content."""
        self._write(self._held + self._text)
        self._held = self._text = ""
        return False

    def _write_up_to(self, marker: str) -> bool:
        """Writes content up to the next marker, which is held. Returns False if there is none yet."""
        before, found, after = self._text.partition(marker)
        if found:
            self._write(before)
            self._held, self._text = found, after
            return True
        kept = overlap(before, marker)
        self._write(before[: len(before) - kept])
        self._text = before[len(before) - kept :]
        return False

    def _begin_call(self, name: str, id: str = "") -> None:
        self._held = self._space = ""
        self._events.append(CallStart(self._num_calls, id or self._new_id(), name))
        self._num_calls += 1
        self._strings = JsonStrings()

    def _write_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._num_calls - 1, self._strings.push(text)))

    def _new_id(self) -> str:
        return call_id()


class JsonCallParser(ToolCallParser):
    """Base for formats whose calls are JSON objects.

    Class attributes:
        OPENING: The marker with which every call, or list of calls, begins; empty if there is none.
    """

    OPENING: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def grammar(cls, calls: CallRules) -> list[str]:
        """Returns rules; the one named `calls` is an output's calls, or a part of them in one piece.

        Raises:
            GrammarError: See `CallRules`.
        """

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._scanner = CallScanner()
        self._has_begun = False
        self._is_marked = False

    @abstractmethod
    def _after_call(self) -> bool:
        """The state behind a call."""

    def _no_call(self) -> bool:
        """The held text is no call."""
        self._write_held()
        return self._go(self._content)

    def _read_call(self, *, marked: bool, name: str | None = None, id: str = "") -> bool:
        """Begins to read the object at the start of the text.

        Args:
            marked: A marker says that this is a call. Otherwise it is one only if there is a tool with its name.
            name, id: Of the call, if the object is its arguments.
        """
        self._scanner = CallScanner(name)
        self._has_begun = name is not None
        self._is_marked = marked
        if name is not None:
            self._begin_call(name, id)
        return self._go(self._in_call)

    def _in_call(self) -> bool:
        scanner = self._scanner
        taken = scanner.push(self._text)
        if not self._has_begun:
            self._hold(taken)
            if scanner.name is not None and not self._is_name(scanner.name):
                return self._no_call()
            if scanner.name is not None and scanner.has_arguments:
                self._has_begun = True
                self._begin_call(scanner.name)
        else:
            self._text = self._text[taken:]
        if self._has_begun:
            self._write_arguments(scanner.take())
        if scanner.state == "open":
            return False
        return self._go(self._after_call) if self._has_begun else self._no_call()

    def _is_name(self, name: str) -> bool:
        return 0 < len(name) <= _MAX_NAME and name.isprintable() if self._is_marked else name in self._tools

    def _in_list(self) -> bool:
        """The state in which a list's next call comes."""
        if not self._hold_space():
            return False
        return self._read_call(marked=self._is_marked) if self._text[0] == "{" else self._no_call()

    def _after_item(self) -> bool:
        """The state behind a list's call."""
        if not self._hold_space():
            return False
        if self._text[0] == ",":
            self._hold(1)
            return self._go(self._in_list)
        if self._text[0] == "]":
            self._held, self._text = "", self._text[1:]
            return self._go(self._after_list)
        return self._no_call()

    def _after_list(self) -> bool:
        """The state behind a list of calls."""
        return self._content()

    def _end(self, cut: bool) -> None:
        if self._state in (self._after_call, self._after_item):
            return  # separators, or the start of a marker
        super()._end(cut)

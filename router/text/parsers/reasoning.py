"""Reasoning before the answer: `<think>…</think>` at the start of an output.

Many templates write `<think>` at the end of the prompt, so that the output begins inside. White space at both ends of
the reasoning, and before the answer, is layout.
"""

from collections.abc import Callable

from cpd.grammar.lark import literal, text_up_to, text_without, token
from router.text.parsers.events import Content, Event, Reasoning
from router.text.parsers.tool_calls import SPACE
from router.text.stops import overlap

TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""The tags around reasoning, by the parser's name."""


def reasoning_rules(tags: tuple[str, str], token_id: Callable[[str], int | None], *, opened: bool = True) -> list[str]:
    """Returns the rules of `reasoning`, with what follows its end.

    Args:
        tags: Before and after the reasoning.
        token_id: Returns the id of a token of the tokenizer, None for a text that is no token.
        opened: The prompt began it. Otherwise both tags must be tokens.
    """
    open_id, close_id = map(token_id, tags)
    line = literal("\n")
    space = f"{line}? {line}?"
    if close_id is None:
        return [f"reasoning: thoughts {space}", f"thoughts[lazy]: {text_up_to(tags[1])}"]
    start = "" if opened or open_id is None else token(open_id)
    return [f"reasoning: {start} THOUGHTS? {token(close_id)} {space}", f"THOUGHTS: {text_without(tags[1])}"]


class ReasoningParser:
    """Separates the reasoning of one output.

    Args:
        tags: Before and after the reasoning.
        inside: The output begins within the reasoning.
    """

    def __init__(self, tags: tuple[str, str], *, inside: bool) -> None:
        self._open, self._close = tags
        self._state = "inside" if inside else "start"
        self._text = ""  # not decided yet
        self._space = ""  # reasoning, unless it is the end
        self._has_some = False

    def push(self, text: str) -> list[Event]:
        """Adds text and returns what is certain now."""
        self._text += text
        events: list[Event] = []
        if self._state == "start":
            self._look_for_start()
        if self._state == "inside":
            events += self._reason()
        if self._state == "behind":
            self._text = self._text.lstrip(SPACE)
            if self._text:
                self._state = "content"
        if self._state == "content" and self._text:
            events.append(Content(self._text))
            self._text = ""
        return events

    @property
    def is_inside(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._state == "inside"

    def flush(self) -> list[Event]:
        """Returns the rest, after the last text."""
        if self._state == "inside":
            return self._write(self._text)
        return [Content(self._text)] if self._text else []

    def _look_for_start(self) -> None:
        rest = self._text.lstrip(SPACE)
        if rest.startswith(self._open):
            self._text = rest.removeprefix(self._open)
            self._state = "inside"
        elif not self._open.startswith(rest):
            self._state = "content"

    def _reason(self) -> list[Event]:
        before, found, after = self._text.partition(self._close)
        kept = 0 if found else overlap(before, self._close)
        self._text = after if found else before[len(before) - kept :]
        if found:
            self._state = "behind"
        return self._write(before[: len(before) - kept])

    def _write(self, text: str) -> list[Event]:
        text = self._space + text if self._has_some else text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        self._has_some = self._has_some or bool(body)
        return [Reasoning(body)] if body else []

"""The responses of chats in APIs whose streams are typed events, not chunks of one form."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.api.format import Format, Parsing
from router.api.responses import Usage
from router.dispatch.output import Choice, Delta
from router.text.parsers.events import Event
from router.text.parsers.output import OutputParser, joined


class EventFormat(Format):
    """Writes the response of a chat with one choice.

    A response in one piece is the document that the stream would have built up.

    Attributes:
        parser: The parser of the output.
        reasoning_tokens: Number of tokens with text of their own, up to the end of the reasoning.
    """

    PARSES = True

    def __init__(self, parsing: Parsing | None) -> None:
        self.parser = OutputParser(None, None) if parsing is None else parsing.new_parser()
        self.reasoning_tokens = 0

    def delta(self, index: int, delta: Delta) -> bytes:
        events: list[Event] = []
        for piece in delta.pieces:
            events += self.parser.push(piece)
            self.reasoning_tokens += self.parser.is_reasoning
        return self._write(events)

    def final(self, choice: Choice, delta: Delta) -> bytes:
        return self._write(self.parser.flush(cut=choice.finish == "length")) + self.end(choice)

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        (choice,) = choices
        delta = choice.take()
        self.first(choice.index, prompts[0], usage)
        self.delta(choice.index, delta)
        self.final(choice, delta)
        return orjson.dumps(self.document(usage))

    @abstractmethod
    def event(self, event: Event) -> bytes:
        """The events of the API for one of the parser's, which is not empty."""

    @abstractmethod
    def end(self, choice: Choice) -> bytes:
        """The events for the end of the output."""

    @abstractmethod
    def document(self, usage: Usage) -> Mapping[str, Any]:
        """The response in one piece, after the end of the output."""

    def _write(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self.event, joined(events)))


def server_sent(event: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))

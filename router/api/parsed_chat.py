"""Chat responses whose text is split into reasoning, content and tool calls. Others take `ChatFormat` alone."""

from collections.abc import Sequence

from router.api.format import Parsing
from router.api.openai import ChatFormat
from router.api.responses import ApiFinishReason, CalledFunctionDelta, ChatChoice, ChatDelta, ChatMessage, ChatToolCall
from router.api.schemas import GenerateRequest
from router.dispatch.output import Choice, Delta, FinishReason
from router.text.detokenize import Vocabulary
from router.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.parsers.output import OutputParser

_NOTHING = Delta([], [], [])


class ParsedChatFormat(ChatFormat):
    """`chat.completion` and its chunks, with `reasoning_content` and `tool_calls`.

    Each event of the parser is a chunk. Log-probabilities and token ids are in the first chunk since their tokens
    arrived, also if those are no text yet.

    Args:
        parsing: How the outputs are parsed.
    """

    PARSES = True

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary, fingerprint: bytes, parsing: Parsing) -> None:
        super().__init__(request, vocabulary, fingerprint)
        self._finish_with_calls = parsing.finish_with_calls
        self._new_parser = parsing.new_parser
        self._parsers: dict[int, OutputParser] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        events = self._parser(index).push(delta.text)
        match events:
            case [Content(text)] if self._is_plain:  # nearly always
                return super().delta(index, Delta([text], [], []))
        return self._write(index, events, delta)

    def final(self, choice: Choice, delta: Delta) -> bytes:
        index, parser = choice.index, self._parser(choice.index)
        rest = self._write(index, parser.flush(cut=choice.finish == "length"), _NOTHING)
        return rest + self._chat_chunk(index, {}, self._api_finish(choice.finish, parser), delta)

    def _choice(self, choice: Choice) -> ChatChoice:
        delta, parser = choice.take(), self._new_parser()
        events = parser.push(delta.text) + parser.flush(cut=choice.finish == "length")
        written = self._chat_choice(choice, delta, _message(events))
        written["finish_reason"] = self._api_finish(choice.finish, parser)
        return written

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._new_parser()
        return parser

    def _api_finish(self, finish: FinishReason | None, parser: OutputParser) -> ApiFinishReason | None:
        return self._finish_with_calls if finish == "stop" and parser.has_calls else finish

    def _write(self, index: int, events: Sequence[Event], delta: Delta) -> bytes:
        """The chunks of events; `delta` has what else came with their text."""
        deltas = [_chat_delta(event) for event in events]
        if not deltas and (delta.scores or (self._with_ids and delta.token_ids)):
            deltas = [{}]
        return b"".join(
            self._chat_chunk(index, one, None, delta if position == 0 else _NOTHING)
            for position, one in enumerate(deltas)
        )


def chat_format(
    request: GenerateRequest, vocabulary: Vocabulary, fingerprint: bytes, parsing: Parsing | None
) -> ChatFormat:
    """Makes what writes the response of OpenAI's own API. See `ChatForm`."""
    if parsing is None:
        return ChatFormat(request, vocabulary, fingerprint)
    return ParsedChatFormat(request, vocabulary, fingerprint, parsing)


def _chat_delta(event: Event) -> ChatDelta:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, id, name):
            function: CalledFunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(events: Sequence[Event]) -> ChatMessage:
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    calls: list[ChatToolCall] = [
        {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": arguments[event.index]}}
        for event in events
        if isinstance(event, CallStart)
    ]
    has_other = bool(reasoning or calls)
    message: ChatMessage = {"role": "assistant", "content": content or (None if has_other else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message

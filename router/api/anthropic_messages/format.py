"""Messages of the Messages API, and the events of their streams.

```
message_start                             the message, without content
  content_block_start                     a block begins: thinking, text or tool_use
    content_block_delta …                 thinking_delta, text_delta, input_json_delta
  content_block_stop
message_delta                             why it ended, and the usage
message_stop
```
"""

import secrets
from typing import Any, cast

from router.api.anthropic_messages.documents import (
    ContentBlock,
    ContentBlockDeltaEvent,
    ContentBlockStartEvent,
    ContentBlockStopEvent,
    InputJsonDelta,
    MessageDeltaEvent,
    MessageDocument,
    MessageStartEvent,
    MessageStopEvent,
    MessageUsage,
    TextDelta,
    ThinkingDelta,
)
from router.api.anthropic_messages.errors import messages_error
from router.api.anthropic_messages.strict_json import StrictJson
from router.api.anthropic_messages.tool_input import tool_input
from router.api.event_format import EventFormat, server_sent
from router.api.format import Parsing
from router.api.responses import Usage
from router.api.schemas import ChatRequest
from router.dispatch.output import Choice
from router.errors import ApiError
from router.text.detokenize import Vocabulary
from router.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning


class MessagesFormat(EventFormat):
    """Writes one message."""

    def __init__(
        self, request: ChatRequest, vocabulary: Vocabulary, fingerprint: bytes, parsing: Parsing | None
    ) -> None:
        super().__init__(parsing)
        self._block: ContentBlock | None = None  # the block that has begun and not ended
        self._pieces: list[str] = []  # of that block's text or input
        self._json = StrictJson()
        self._message: MessageDocument = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(0, 0, 0, 0),
        }

    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        self._message["usage"] = self._counted(usage)
        event: MessageStartEvent = {"type": "message_start", "message": self._message}
        return server_sent(event)

    def event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                opening = b"" if self._is_in("text") else self._begin({"type": "text", "text": ""})
                return opening + self._more(text, {"type": "text_delta", "text": text})
            case Reasoning(text):
                thinking: ContentBlock = {"type": "thinking", "thinking": "", "signature": ""}
                opening = b"" if self._is_in("thinking") else self._begin(thinking)
                return opening + self._more(text, {"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                self._json = StrictJson()
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                strict = self._json.push(text)
                return self._more(strict, {"type": "input_json_delta", "partial_json": strict}) if strict else b""

    def end(self, choice: Choice) -> bytes:
        message = self._message
        if choice.finish == "length":
            message["stop_reason"] = "max_tokens"
        elif choice.stop_string is not None:
            message["stop_reason"], message["stop_sequence"] = "stop_sequence", choice.stop_string
        else:
            message["stop_reason"] = "tool_use" if self.parser.has_calls else "end_turn"
        return self._end_block()

    def closing(self, usage: Usage) -> bytes:
        message = self.document(usage)
        ended: MessageDeltaEvent = {
            "type": "message_delta",
            "delta": {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]},
            "usage": message["usage"],
        }
        stop: MessageStopEvent = {"type": "message_stop"}
        return server_sent(ended) + server_sent(stop)

    def failure(self, error: ApiError) -> bytes:
        return server_sent(messages_error(error))

    def document(self, usage: Usage) -> MessageDocument:
        self._message["usage"] = self._counted(usage)
        return self._message

    # ---- blocks ----

    def _is_in(self, kind: str) -> bool:
        return self._block is not None and self._block["type"] == kind

    def _begin(self, block: ContentBlock) -> bytes:
        """Ends the block before, and begins another one."""
        written = self._end_block()
        self._block, self._pieces = block, []
        self._message["content"].append(block)
        event: ContentBlockStartEvent = {
            "type": "content_block_start",
            "index": self._index,
            "content_block": block,
        }
        return written + server_sent(event)

    def _more(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> bytes:
        self._pieces.append(text)
        event: ContentBlockDeltaEvent = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return server_sent(event)

    def _end_block(self) -> bytes:
        """Ends the block that has begun, if one has."""
        block, text = self._block, "".join(self._pieces)
        if block is None:
            return b""
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block["thinking"] = text
        else:
            block["input"] = cast("dict[str, Any]", tool_input(text))
        self._block = None
        event: ContentBlockStopEvent = {"type": "content_block_stop", "index": self._index}
        return server_sent(event)

    @property
    def _index(self) -> int:
        """The index of the last block."""
        return len(self._message["content"]) - 1

    def _counted(self, usage: Usage) -> MessageUsage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return _usage(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"], self.reasoning_tokens)


def _usage(new: int, cached: int, output: int, thinking: int) -> MessageUsage:
    return {
        "input_tokens": new,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }

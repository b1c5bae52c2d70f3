"""Responses of the Responses API, and the events of their streams.

```
created, in_progress                      the response, without output
  output_item.added                       an item of the output begins: reasoning, message or function_call
    content_part.added                    (not in a call)
      output_text.delta …                 reasoning_text.delta, function_call_arguments.delta
      output_text.done                    reasoning_text.done, function_call_arguments.done
    content_part.done
  output_item.done
completed | incomplete | failed           the whole response
```

Items come one after the other. All events have consecutive numbers.
"""

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from router.api.event_format import EventFormat, server_sent
from router.api.format import Parsing
from router.api.openai_responses.documents import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartEvent,
    ItemPlace,
    OutputFunctionCall,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningText,
    ResponseDocument,
    ResponseEvent,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from router.api.openai_responses.request import ResponsesRequest
from router.api.responses import Usage
from router.api.schemas import ChatRequest
from router.api.strict_model import StrictModel
from router.dispatch.output import Choice
from router.errors import ApiError
from router.text.detokenize import Vocabulary
from router.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning

Keep = Callable[[ResponseDocument], Awaitable[None]]
"""Stores a response that has ended."""


class ResponsesFormat(EventFormat):
    """Writes one response.

    Args:
        request: The chat that the client's request was translated to.
        asked: The client's request.
        keep: Stores the response; None if it is not stored.
    """

    def __init__(
        self,
        request: ChatRequest,
        vocabulary: Vocabulary,
        fingerprint: bytes,
        parsing: Parsing | None,
        *,
        asked: ResponsesRequest,
        keep: Keep | None,
    ) -> None:
        super().__init__(parsing)
        self._keep = keep
        self._document = _begun(request, asked, is_stored=keep is not None)
        self._num_events = 0
        self._item: OutputItem | None = None  # the item that has begun and not ended
        self._pieces: list[str] = []  # of that item's text

    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        return self._response_event("response.created") + self._response_event("response.in_progress")

    def event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                opening = b"" if self._is_in("message") else self._begin(_message())
                self._pieces.append(text)
                answer: TextDeltaEvent = {
                    "type": "response.output_text.delta",
                    **self._place(),
                    "content_index": 0,
                    "delta": text,
                    "logprobs": [],
                }
                return opening + server_sent(answer)
            case Reasoning(text):
                opening = b"" if self._is_in("reasoning") else self._begin(_reasoning())
                self._pieces.append(text)
                thought: ReasoningDeltaEvent = {
                    "type": "response.reasoning_text.delta",
                    **self._place(),
                    "content_index": 0,
                    "delta": text,
                }
                return opening + server_sent(thought)
            case CallStart(_, call_id, name):
                return self._begin(_function_call(call_id, name))
            case CallArguments(_, text):
                self._pieces.append(text)
                arguments: ArgumentsDeltaEvent = {
                    "type": "response.function_call_arguments.delta",
                    **self._place(),
                    "delta": text,
                }
                return server_sent(arguments)

    def end(self, choice: Choice) -> bytes:
        is_cut = choice.finish == "length"
        self._document["status"] = "incomplete" if is_cut else "completed"
        self._document["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return self._end_item(is_cut=is_cut)

    def closing(self, usage: Usage) -> bytes:
        document = self.document(usage)
        is_cut = document["status"] == "incomplete"
        return self._response_event("response.incomplete" if is_cut else "response.completed")

    def failure(self, error: ApiError) -> bytes:
        # a stream that waited for a model to wake may have no events yet, and clients expect this one first
        created = b"" if self._num_events else self._response_event("response.created")
        self._document["status"] = "failed"
        self._document["error"] = {"code": "server_error", "message": error.message}
        return created + self._response_event("response.failed")

    def document(self, usage: Usage) -> ResponseDocument:
        self._document["usage"] = _usage(usage, self.reasoning_tokens)
        return self._document

    async def written(self) -> None:
        if self._keep is not None:
            await self._keep(self._document)

    # ---- items ----

    def _is_in(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _begin(self, item: OutputItem) -> bytes:
        """Ends the item before, and begins another one."""
        written = self._end_item(is_cut=False)
        self._item, self._pieces = item, []
        self._document["output"].append(item)
        written += self._item_event("response.output_item.added", item)
        if item["type"] == "message":
            written += self._part_event("response.content_part.added", _text_part(""))
        elif item["type"] == "reasoning":
            written += self._part_event("response.content_part.added", _reasoning_part(""))
        return written

    def _end_item(self, *, is_cut: bool) -> bytes:
        """Ends the item that has begun, if one has."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return b""
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "message":
            item["content"] = [_text_part(text)]
            answer: TextDoneEvent = {
                "type": "response.output_text.done",
                **self._place(),
                "content_index": 0,
                "text": text,
                "logprobs": [],
            }
            written = server_sent(answer) + self._part_event("response.content_part.done", _text_part(text))
        elif item["type"] == "reasoning":
            item["content"] = [_reasoning_part(text)]
            thought: ReasoningDoneEvent = {
                "type": "response.reasoning_text.done",
                **self._place(),
                "content_index": 0,
                "text": text,
            }
            written = server_sent(thought) + self._part_event("response.content_part.done", _reasoning_part(text))
        else:
            item["arguments"] = text
            call: ArgumentsDoneEvent = {
                "type": "response.function_call_arguments.done",
                **self._place(),
                "arguments": text,
            }
            written = server_sent(call)
        written += self._item_event("response.output_item.done", item)
        self._item = None
        return written

    # ---- events ----

    def _place(self) -> ItemPlace:
        """The number of the next event, and the item that has begun."""
        assert self._item is not None
        return {
            "sequence_number": self._next_number(),
            "output_index": len(self._document["output"]) - 1,
            "item_id": self._item["id"],
        }

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _response_event(
        self,
        kind: Literal[
            "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
        ],
    ) -> bytes:
        number = self._next_number()
        event: ResponseEvent = {"type": kind, "sequence_number": number, "response": self._document}
        return server_sent(event)

    def _item_event(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], item: OutputItem
    ) -> bytes:
        number, index = self._next_number(), len(self._document["output"]) - 1
        event: OutputItemEvent = {"type": kind, "sequence_number": number, "output_index": index, "item": item}
        return server_sent(event)

    def _part_event(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        part: OutputText | ReasoningText,
    ) -> bytes:
        event: ContentPartEvent = {"type": kind, **self._place(), "content_index": 0, "part": part}
        return server_sent(event)


def _message() -> OutputMessage:
    return {"type": "message", "id": _id("msg"), "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> OutputReasoning:
    return {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": [], "content": []}


def _function_call(call_id: str, name: str) -> OutputFunctionCall:
    return {
        "type": "function_call",
        "id": _id("fc"),
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": "",
    }


def _text_part(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _begun(chat: ChatRequest, asked: ResponsesRequest, *, is_stored: bool) -> ResponseDocument:
    """Returns a response without output. What the request leaves out has the value that it has here."""
    reasoning, form = asked.reasoning, asked.text.format if asked.text is not None else None
    choice = "auto" if asked.tool_choice is None else asked.tool_choice
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "store": is_stored,
        "temperature": chat.temperature,
        "text": {"format": {"type": "text"} if form is None else _dumped(form)},
        "tool_choice": choice if isinstance(choice, str) else _dumped(choice),
        "tools": [_dumped(tool) for tool in asked.tools],
        "top_p": chat.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _dumped(model: StrictModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_unset=True)


def _usage(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }

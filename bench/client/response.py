"""Interprets responses: a streamed answer, or one plain body."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from bench.client.errors import RequestError
from bench.client.sse import EventSplitter
from bench.record import Failure, Record

_DONE = b"[DONE]"
_BROKEN_OFF = ("abort", "error")  # finish_reasons of servers that gave the answer up (vLLM, SGLang, OpenRouter)
_MAX_DETAIL = 300
_MAX_REFUSAL_BYTES = 64 << 10
_MAX_BODY_BYTES = 16 << 20


class Response(Protocol):
    """Takes the data of a connection. Exceptions of its methods end the request and close the connection.

    Attributes:
        came_s: Time of the last data that belongs to the answer. Keep-alive comments do not.
    """

    came_s: float

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Takes the status and the headers, names in lower case."""
        ...

    def body(self, data: bytes, now_s: float) -> bool:
        """Takes the next piece of the body, received at `now_s`. Returns True if the response needs no more."""
        ...


class StreamedAnswer:
    """The streamed answer to one request. It updates the record with each piece.

    Args:
        record: Record of the request.
        count: Counts the tokens of a text, for servers without usage.
    """

    def __init__(self, record: Record, count: Callable[[str], int] | None) -> None:
        self.record = record
        self.came_s = 0.0
        self._count = count
        self._events = EventSplitter()
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._called_tools = False
        self._usage: dict[str, Any] = {}
        self._done_s: float | None = None
        self._other_body = bytearray()

    @property
    def text(self) -> str:
        """The answer so far, without reasoning and tool calls."""
        return "".join(self._answer)

    @property
    def done(self) -> bool:
        """True if the stream has ended with both a finish_reason and [DONE]."""
        return self._done_s is not None and bool(self.record.finish_reason)

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `Response`."""
        self.record.status = status
        self.record.route = headers.get(b"x-cpd-route", b"").decode("latin-1")
        self.record.worker = headers.get(b"x-cpd-decode-worker", b"").decode("latin-1")

    def body(self, data: bytes, now_s: float) -> bool:
        """See `Response`.

        Raises:
            RequestError: It is not a stream of completions, or it has an error event.
        """
        if self.record.status != 200:
            self.came_s = now_s
            self._other_body += data
            return len(self._other_body) > _MAX_REFUSAL_BYTES
        try:
            events = self._events.feed(data)
        except ValueError as error:
            raise RequestError(Failure.MALFORMED, str(error)) from None
        if events:
            self.came_s = now_s
        for name, payload in events:
            if payload == _DONE:
                self._done_s = now_s
                return True
            if name == b"error":
                raise RequestError(Failure.STREAM_ERROR, server_message(payload))
            try:
                chunk = orjson.loads(payload)
            except orjson.JSONDecodeError as error:
                raise _malformed(f"an event is not JSON ({error})", payload) from None
            if not isinstance(chunk, dict):
                raise _malformed("an event is not a JSON object", payload)
            self._take(chunk, now_s)
        return False

    def _take(self, chunk: dict[str, Any], now_s: float) -> None:
        """Takes one event of the stream, received at `now_s`."""
        usage = chunk.get("usage")
        if usage and isinstance(usage, dict):
            self._usage = usage
        choices = chunk.get("choices")
        if chunk.get("error") or not isinstance(choices, list):
            if chunk.get("error") or chunk.get("object") == "error":
                raise RequestError(Failure.STREAM_ERROR, server_message(orjson.dumps(chunk)))
            if not usage:
                raise _malformed("an event without choices", orjson.dumps(chunk))
            return
        generated = False
        for choice in choices:
            if not isinstance(choice, dict):
                raise _malformed("a choice that is not an object", orjson.dumps(chunk))
            delta = choice.get("delta")
            if delta is None:
                text = choice.get("text")
            elif isinstance(delta, dict):
                text = delta.get("content")
                generated |= not text and self._take_other(delta)
            else:
                raise _malformed("a delta that is not an object", orjson.dumps(chunk))
            if text:
                if not isinstance(text, str):
                    raise _malformed("text that is not a string", orjson.dumps(chunk))
                self._answer.append(text)
                generated = True
                if self.record.answer_s is None:
                    self.record.answer_s = now_s
            if reason := choice.get("finish_reason"):
                self.record.finish_reason = str(reason)
        if generated:
            self.record.content_s.append(now_s)

    def check(self, now_s: float) -> None:
        """Checks the whole response, which ended without an error at `now_s`.

        Raises:
            RequestError: The answer is not complete.
        """
        record = self.record
        if record.status != 200:
            raise RequestError(f"http_{record.status}", server_message(bytes(self._other_body)))
        rest = self._events.pending.strip()
        if rest.removeprefix(b"data:").strip() == _DONE:  # without the blank line after it
            self._done_s = self._done_s or now_s
        if not self.done:
            if rest and not (record.finish_reason or record.content_s):
                raise _malformed("no server-sent events (does the server support `stream`?)", rest)
            missing = [] if record.finish_reason else ["finish_reason"]
            missing += [] if self._done_s else ["[DONE]"]
            raise RequestError(Failure.INCOMPLETE, f"the stream ended without {' and without '.join(missing)}")
        if record.finish_reason in _BROKEN_OFF:
            raise RequestError(Failure.STREAM_ERROR, f"the finish_reason is {record.finish_reason}")
        if not record.content_s:
            raise RequestError(Failure.EMPTY, f"no text, and the finish_reason is {record.finish_reason}")

    def settle(self, now_s: float, failure: RequestError | None) -> None:
        """Completes the record at the end, with or without a failure."""
        record = self.record
        if failure is not None:
            record.error, record.detail = failure.kind, failure.detail
        record.ended_s = now_s if self._done_s is None else self._done_s
        record.prompt_tokens = _whole(self._usage.get("prompt_tokens"))
        record.output_tokens = _whole(self._usage.get("completion_tokens"))
        details = self._usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = _whole(details.get("cached_tokens"))
        if record.output_tokens is None and self._count is not None and not self._called_tools:
            record.output_tokens = sum(self._count("".join(part)) for part in (self._reasoning, self._answer) if part)

    def _take_other(self, delta: dict[str, Any]) -> bool:
        """Takes reasoning and tool calls. Returns True if the delta has some."""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning and isinstance(reasoning, str):
            self._reasoning.append(reasoning)
        if delta.get("tool_calls"):
            self._called_tools = True
            return True
        return bool(reasoning)


class PlainBody:
    """Collects a whole response."""

    def __init__(self) -> None:
        self.status = 0
        self.came_s = 0.0
        self.data = bytearray()

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `Response`."""
        self.status = status

    def body(self, data: bytes, now_s: float) -> bool:
        """See `Response`.

        Raises:
            RequestError: The body is too long.
        """
        self.came_s = now_s
        self.data += data
        if len(self.data) > _MAX_BODY_BYTES:
            raise RequestError(Failure.MALFORMED, f"a body of more than {_MAX_BODY_BYTES >> 20} MiB")
        return False


def server_message(body: bytes) -> str:
    """The message in an error's body: that of OpenAI's or a similar error object, else the text itself. One line of at
    most 300 characters."""
    message: Any = body.decode(errors="replace")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict):
        found = found.get("error") or found
        if isinstance(found, dict):
            found = found.get("message") or found.get("detail")
        message = found if isinstance(found, str) else message
    return " ".join(message.split())[:_MAX_DETAIL]


def _malformed(what: str, body: bytes) -> RequestError:
    return RequestError(Failure.MALFORMED, f"{what}: {server_message(body)}")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

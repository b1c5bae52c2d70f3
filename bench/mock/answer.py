"""The mock server's answer to a request, as timed steps. Pure functions, without sockets or a clock."""

from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import orjson

from bench.mock.behaviour import Answering

WORD = " word"
"""The text of every token."""

CREATED = 1_700_000_000


class Step(NamedTuple):
    """A step of an answer.

    Attributes:
        at_s: Time of the step, in seconds of work since the request was read.
        payload: Bytes to send.
        content: True if it has generated text.
        then: Close or reset the connection afterwards.
    """

    at_s: float
    payload: bytes
    content: bool = False
    then: Literal["", "close", "reset"] = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for text.

    Attributes:
        number: Number of the request, from 0.
        chat: For /v1/chat/completions instead of /v1/completions.
        model: Name of the model.
        prompt: Contents of all messages, one per line; each word is a token.
        max_tokens: Tokens to generate.
        stream: Answer as a stream of events instead of one JSON body.
        include_usage: End with an event that has token counts.
    """

    number: int
    chat: bool
    model: str
    prompt: str
    max_tokens: int
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.split())


def answer(request: Request, how: Answering) -> Iterator[Step]:
    """The steps of the answer in order of time."""
    fault = how.fault if _has_fault(request.number, how.fault_share) else ""
    if fault == "status":
        yield Step(0.0, error_response(how.status, "the mock server was told to fail"))
    elif fault == "json" or not request.stream:
        chunks = len(_chunk_sizes(request, how))
        at_s = (how.ttft_ms + how.itl_ms * max(0, chunks - 1)) / 1e3
        yield Step(at_s, json_response(200, _whole(request, how)))
    else:
        yield from _stream(request, how, fault)


def json_response(status: int, body: Any) -> bytes:
    """A whole HTTP response with a JSON body."""
    content = orjson.dumps(body)
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def error_response(status: int, message: str) -> bytes:
    """A whole HTTP response with an error in OpenAI's form."""
    return json_response(status, {"error": {"message": message, "type": "mock_error", "param": None, "code": status}})


def _stream(request: Request, how: Answering, fault: str) -> Iterator[Step]:
    route = f"X-CPD-Route: {how.route}\r\n" if how.route else ""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{route}Transfer-Encoding: chunked\r\n\r\n"
    yield Step(0.0, head.encode())
    if request.chat and how.role_first:
        yield Step(0.0, _event(_part(request, {"role": "assistant", "content": ""})))
    sizes = _chunk_sizes(request, how)
    ttft_s, itl_s = how.ttft_ms / 1e3, how.itl_ms / 1e3
    sent = 0
    made: dict[tuple[bool, int], bytes] = {}  # most chunks are equal
    for index, size in enumerate(sizes):
        if fault and index == how.fault_after:
            break
        is_opening = request.chat and sent < how.opening_tokens
        sent += size
        event = made.get((is_opening, size))
        if event is None or how.usage == "every":
            usage = _usage(request, how, sent) if how.usage == "every" else None
            event = made[is_opening, size] = _event(_part(request, _text(request, how, is_opening, size), usage=usage))
        yield Step(ttft_s + index * itl_s, event, content=True)
    at_s = ttft_s + itl_s * max(0, min(how.fault_after, len(sizes)) if fault else len(sizes) - 1)
    if fault:
        yield from _failing(fault, at_s)
        return
    ending = b"" if how.no_finish_reason else _event(_part(request, {} if request.chat else "", finish="length"))
    if how.usage == "last" and request.include_usage:
        ending += _event({**_envelope(request), "choices": [], "usage": _usage(request, how, sent)})
    if not how.no_done:
        ending += _chunk(b"data: [DONE]\n\n")
    yield Step(at_s, ending + b"0\r\n\r\n")


def _failing(fault: str, at_s: float) -> Iterator[Step]:
    if fault == "garbage":
        yield Step(at_s, _chunk(b"data: {this is no JSON\n\n") + b"0\r\n\r\n")
    elif fault == "error":
        body = {"error": {"message": "the mock server failed in the middle", "type": "mock_error", "code": 500}}
        yield Step(at_s, _event(body) + b"0\r\n\r\n")
    elif fault == "cut":
        yield Step(at_s, b"", then="close")
    elif fault == "reset":
        yield Step(at_s, b"", then="reset")
    # hang: no step, so the response never ends


def _has_fault(number: int, share: float) -> bool:
    """True if request `number` is in the evenly spread `share` with the fault."""
    return int((number + 1) * share) > int(number * share)


def _chunk_sizes(request: Request, how: Answering) -> list[int]:
    """Tokens of each chunk."""
    tokens = request.max_tokens if how.output_tokens is None else how.output_tokens
    whole, rest = divmod(tokens, how.tokens_per_chunk)
    return [how.tokens_per_chunk] * whole + [rest] * bool(rest)


def _text(request: Request, how: Answering, is_opening: bool, tokens: int) -> Any:
    """The text of a chunk: a string, or a delta for chat."""
    text = WORD * tokens
    if not request.chat:
        return text
    if not is_opening:
        return {"content": text}
    if how.opening == "tool_calls":
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    return {how.opening: text}


def _part(request: Request, text: Any, *, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    """A chunk of a stream."""
    choice = {"index": 0, "delta" if request.chat else "text": text, "logprobs": None, "finish_reason": finish}
    return {**_envelope(request), "choices": [choice], **({"usage": usage} if usage else {})}


def _whole(request: Request, how: Answering) -> dict[str, Any]:
    """The body without a stream."""
    tokens = sum(_chunk_sizes(request, how))
    text = {"message": {"role": "assistant", "content": WORD * tokens}} if request.chat else {"text": WORD * tokens}
    finish = None if how.no_finish_reason else "length"
    body = {**_envelope(request), "choices": [{"index": 0, **text, "finish_reason": finish}]}
    return body if how.usage == "none" else {**body, "usage": _usage(request, how, tokens)}


def _envelope(request: Request) -> dict[str, Any]:
    kind = "chat.completion" if request.chat else "text_completion"
    if request.chat and request.stream:
        kind = "chat.completion.chunk"
    return {"id": f"mock-{request.number}", "object": kind, "created": CREATED, "model": request.model}


def _usage(request: Request, how: Answering, output_tokens: int) -> dict[str, Any]:
    prompt_tokens = request.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": min(how.cached_tokens, prompt_tokens)},
    }


def _event(body: Any) -> bytes:
    return _chunk(b"data: " + orjson.dumps(body) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    """One chunk of a chunked HTTP body."""
    return b"%x\r\n%s\r\n" % (len(data), data)

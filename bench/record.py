"""What is measured of one request, as the client process saw it.

Times are seconds of `time.perf_counter()`, which on Linux is one clock for all processes of a machine.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Failure(StrEnum):
    """Why a request is no completed one. An HTTP status other than 200 has a kind of its own, `http_<status>`."""

    CONNECT = "connect"  # no connection to the server
    DISCONNECTED = "disconnected"  # the connection ended in the middle of the response
    TIMEOUT = "timeout"  # nothing came for as long as `--timeout-s`
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON, or JSON of another shape
    STREAM_ERROR = "stream_error"  # an error event in the stream
    INCOMPLETE = "incomplete"  # the response ended in order, but without finish_reason or without [DONE]
    EMPTY = "empty"  # a complete stream without any generated text
    ABORTED = "aborted"  # by the person (Ctrl-C) or by the run's plan, not by the server


@dataclass(slots=True)
class Record:
    """One request and what came back.

    Attributes:
        session: Number of the session (conversation) in the workload.
        turn: Number of the turn in it, from 0.
        input_len: Prompt tokens that the workload wanted; 0 if it doesn't say.
        output_len: Output tokens that were asked for.
        due_s: When it had to be sent.
        sent_s: When it was handed to the connection (or the connection was asked for, if none was open).
        content_s: When each chunk with generated text (content, reasoning, a tool call) came. A chunk may hold
            several tokens: this is no token count.
        answer_s: When the first text came that is no reasoning.
        ended_s: When the stream was over or broke.
        status: HTTP status, 0 without a response.
        error: "" for a completed request, else a Failure or `http_<status>`.
        detail: What the server or the socket said about it.
        prompt_tokens: From the server's usage, else unknown.
        output_tokens: From the server's usage, else counted with the given tokenizer, else unknown.
        cached_tokens: Prompt tokens that the server took from a cache; only the server knows.
        finish_reason: The server's.
        route: The response's `x-cpd-route` header, if any.
    """

    session: int
    turn: int
    input_len: int
    output_len: int
    due_s: float
    sent_s: float
    content_s: list[float] = field(default_factory=list)
    answer_s: float | None = None
    ended_s: float = 0.0
    status: int = 0
    error: str = ""
    detail: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    route: str = ""

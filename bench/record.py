"""Measurements of one request, as the client process saw it.

Times are seconds of `time.perf_counter()`, which on Linux is the same clock in all processes of a machine.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Failure(StrEnum):
    """Why a request did not complete. HTTP statuses other than 200 have the kinds `http_<status>`."""

    CONNECT = "connect"  # no connection to the server
    DISCONNECTED = "disconnected"  # the connection ended in the middle of the response
    TIMEOUT = "timeout"  # nothing came for `--timeout-s`
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON, or JSON of another shape
    STREAM_ERROR = "stream_error"  # an error event in the stream, or a finish_reason `abort` or `error`
    INCOMPLETE = "incomplete"  # the response ended without finish_reason or without [DONE]
    EMPTY = "empty"  # a complete stream without generated text
    ABORTED = "aborted"  # by Ctrl-C or the run's plan, not by the server


@dataclass(slots=True)
class Record:
    """One request and its answer.

    Attributes:
        session: Number of the session (conversation) in the workload.
        turn: Number of the turn in the session, from 0.
        input_len: Prompt tokens planned by the workload; 0 if unknown.
        output_len: Requested output tokens.
        due_s: Time at which the request was due.
        sent_s: Time at which it was given to a connection, or a new connection was requested for it.
        content_s: Time of each chunk with generated text (content, reasoning, a tool call). A chunk may hold several
            tokens.
        answer_s: Time of the first text that is not reasoning.
        ended_s: Time at which the stream ended or broke.
        status: HTTP status; 0 without a response.
        error: "" for a completed request, else a Failure or `http_<status>`.
        detail: Message of the server or the socket about the error.
        prompt_tokens: From the server's usage, if any.
        output_tokens: From the server's usage, else counted with the tokenizer, if given.
        cached_tokens: Cached prompt tokens, from the server's usage.
        finish_reason: From the server.
        route: The response's `x-cpd-route` header, if any.
        worker: The response's `x-cpd-decode-worker` header, if any.
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
    worker: str = ""

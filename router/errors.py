"""Errors for clients, in OpenAI's format."""

import math
from collections.abc import Mapping

import orjson
from typing_extensions import TypedDict

from cpd.common.errors import CPDError

_MAX_LINE_CHARS = 500


class ErrorDetail(TypedDict):
    """An error. `param` names the field of the request that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(TypedDict):
    """The body of every error response."""

    error: ErrorDetail


class ApiError(CPDError):
    """An error response in OpenAI's format.

    Args:
        status: HTTP status.
        message: What is wrong and what to do about it, for humans.
        kind: OpenAI's error type, such as `invalid_request_error`.
        code: Short stable name of the error.
        param: The field of the request that is wrong.
        headers: Additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def about(self, param: str | None) -> "ApiError":
        """Returns the same error of a field with another name."""
        if param is None or self.param is None or param == self.param:
            return self
        return ApiError(
            self.status,
            self.message.replace(f"'{self.param}'", f"'{param}'"),
            kind=self.kind,
            code=self.code,
            param=param,
            headers=self.headers,
        )

    def body(self) -> bytes:
        """The JSON document that describes the error."""
        detail: ErrorDetail = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": detail})


def invalid(param: str | None, message: str, *, code: str = "invalid_value", status: int = 400) -> ApiError:
    """The request is not valid."""
    return ApiError(status, message, kind="invalid_request_error", code=code, param=param)


def unsupported(param: str) -> ApiError:
    """The request has a field that would change the result, but that this server does not support."""
    return invalid(param, f"'{param}' is not supported by this server; leave it out.", code="unsupported_parameter")


def unavailable(message: str, retry_after_s: float, *, code: str = "service_unavailable") -> ApiError:
    """No worker can take the request now; the client may retry after `retry_after_s` seconds."""
    return ApiError(503, message, kind="server_error", code=code, headers=_retry_after(retry_after_s))


def waits_too_long(message: str, retry_after_s: float) -> ApiError:
    """The request would wait, or has waited, longer than it may."""
    return unavailable(message, retry_after_s, code="wait_too_long")


def wake_failed(reason: str, retry_after_s: float) -> ApiError:
    """The model sleeps, and can't wake."""
    return unavailable(f"The model could not be woken: {reason}", retry_after_s, code="wake_failed")


def too_many(message: str, retry_after_s: float, *, kind: str = "tokens") -> ApiError:
    """The tenant already has its share of the cluster; it may retry after `retry_after_s` seconds."""
    headers = _retry_after(retry_after_s)
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


def failed(message: str) -> ApiError:
    """The server could not finish a valid request."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def crashes_workers(message: str) -> ApiError:
    """The request crashes workers. OpenAI's clients retry other errors of the server, but not this one."""
    headers = {"x-should-retry": "false"}
    return ApiError(500, message, kind="server_error", code="request_crashes_workers", headers=headers)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def error_event(error: ApiError) -> bytes:
    """The error as a server-sent event, for a stream that has already begun."""
    return b"data: " + error.body() + b"\n\n"


def one_line(text: str) -> str:
    """Text from another process as one line of limited length, for logs and responses."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_LINE_CHARS])
    return line if len(text) <= _MAX_LINE_CHARS else f"{line}…"


def describe(error: BaseException) -> str:
    """An exception as one line, for logs and `/cluster`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""What clients are told when something is wrong: one exception, in OpenAI's shape."""

import math
from collections.abc import Mapping

import orjson

from cpd.errors import CPDError

_MOST_TOLD = 500
"""Characters."""


class ApiError(CPDError):
    """A request that ends in an error of OpenAI's shape.

    Args:
        status: HTTP status.
        message: What is wrong and what to do about it.
        kind: OpenAI's error type, such as `invalid_request_error`.
        code: Short stable name of the error.
        param: Field of the request that is wrong.
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
        self.code = code
        self.headers = dict(headers or {})
        self._detail = {"message": message, "type": kind, "param": param, "code": code}

    def body(self) -> bytes:
        """The JSON document that describes the error."""
        return orjson.dumps({"error": self._detail})


def invalid(param: str | None, message: str, *, code: str = "invalid_value", status: int = 400) -> ApiError:
    """The request itself is wrong."""
    return ApiError(status, message, kind="invalid_request_error", code=code, param=param)


def unsupported(param: str) -> ApiError:
    """A field that would change the result, and that this server can't honour."""
    return invalid(param, f"'{param}' is not supported by this server; leave it out.", code="unsupported_parameter")


def unavailable(message: str, retry_after_s: float, *, code: str = "service_unavailable") -> ApiError:
    """No worker can take the request now; trying again after `retry_after_s` seconds is sensible."""
    return ApiError(503, message, kind="server_error", code=code, headers=_retry_after(retry_after_s))


def too_many(message: str, retry_after_s: float) -> ApiError:
    """This tenant has its share of the cluster; trying again after `retry_after_s` seconds is sensible."""
    headers = _retry_after(retry_after_s)
    return ApiError(429, message, kind="tokens", code="rate_limit_exceeded", headers=headers)


def failed(message: str) -> ApiError:
    """The server could not finish a valid request."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def error_event(error: ApiError) -> bytes:
    """The error as a server-sent event, for a stream that has already begun."""
    return b"data: " + error.body() + b"\n\n"


def one_line(text: str) -> str:
    """What another process says, for logs and answers."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_TOLD])
    return line if len(text) <= _MOST_TOLD else f"{line}…"


def describe(error: BaseException) -> str:
    """An exception in one line, for logs and `/cluster`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

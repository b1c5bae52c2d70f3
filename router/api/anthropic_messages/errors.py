"""Errors in Anthropic's form."""

from collections.abc import Mapping

import orjson

from router.api.anthropic_messages.documents import ErrorType, MessagesErrorResponse
from router.errors import ApiError

_PATH = "/v1/messages"

_TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors, by status. Others of the client are `invalid_request_error`, of the server `api_error`."""


def messages_error(error: ApiError) -> MessagesErrorResponse:
    """Returns an error in Anthropic's form."""
    other: ErrorType = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(error.status, other), "message": error.message}}


def error_body(error: ApiError, path: str) -> bytes:
    """Returns the body of an error response, in the form of the API that the path belongs to."""
    if path == _PATH or path.startswith(f"{_PATH}/"):
        return orjson.dumps(messages_error(error))
    return error.body()

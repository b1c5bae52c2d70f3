"""The parts of `/openapi.json` that FastAPI can't read from the endpoints' signatures.

The endpoints with a body parse their bodies themselves, so FastAPI does not know their types.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from router.api.responses import ChatCompletionChunk, TextCompletionChunk
from router.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from router.errors import ErrorResponse

DESCRIPTION = """An OpenAI-compatible API. A field that would change the result is never ignored: it is honoured, or
refused by name. A field that is `null` counts as left out."""

NO_KEY: dict[str, Any] = {"security": []}
"""For routes that need no API key."""

_ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The API key does not allow this.",
    404: "The model or request does not exist.",
    408: "The body did not arrive within a minute.",
    413: "The body is larger than `--max-body`.",
    415: "The body is not `application/json`, or is compressed.",
    421: "The `Host` header is not one that this server allows (`--allowed-hosts`).",
    429: "A limit of this tenant or client is reached; `Retry-After` says when to try again.",
    500: "A worker failed the request.",
    503: "No worker is ready, or it would take too long; `Retry-After` says when to try again.",
}

_REF = "#/components/schemas/{model}"
_ERROR_BODY = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
"""Given as content, not as a model: FastAPI would declare models in the media type of the route's documents."""

ANY_ERROR: Mapping[int | str, dict[str, Any]] = {
    "default": {"content": _ERROR_BODY, "description": "Any other error, such as 405 or 431."}
}

_TEXT = {"schema": {"type": "string"}}
_HEADERS = {
    "x-request-id": _TEXT | {"description": "The client's own id, or a new one if it sent none or an invalid one."},
    "x-cpd-route": {
        "schema": {"enum": ["local", "remote"]},
        "description": "Whether a prefill worker computed the first prompt (`remote`).",
    },
    "x-cpd-decode-worker": _TEXT | {"description": "The combined worker that ran the first prompt."},
    "x-cpd-prefill-worker": _TEXT | {"description": "The prefill worker, with the route `remote`."},
}
_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": "An id for this request, up to 128 characters (letters, digits and `._:/+=-`).",
} | _TEXT
_TIMEOUT = {
    "name": "x-request-timeout-ms",
    "in": "header",
    "description": "Time from the request's arrival for which a first token is of use, in ms. If it comes later, as "
    "predicted or in fact, the response is a 503.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_TICKS = {
    "name": "x-cpd-ticks",
    "in": "header",
    "description": "With `1`, `GET /requests/{id}` has the time of each token of the answer.",
} | _TEXT
_UNDECLARED: list[Any] = [
    *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
    *(ChatCompletionChunk, TextCompletionChunk, ErrorResponse),
]


def returns(document: type, *error_statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that returns a document or one of these errors."""
    responses: dict[int | str, dict[str, Any]] = {200: {"model": document}}
    for status in error_statuses:
        responses[status] = {"content": _ERROR_BODY, "description": _ERRORS[status]}
    return responses


def generates(request: type[GenerateRequest], whole: type, chunk: type) -> dict[str, Any]:
    """The arguments that declare a route which generates text.

    Args:
        request: Type of the request body.
        whole: Type of the response in one piece.
        chunk: Type of a stream's events.
    """
    responses = returns(whole, 400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
    responses[200] |= {
        "description": "One document, or with `stream` server-sent events that end with `[DONE]` or with an error.",
        "content": {"text/event-stream": {"itemSchema": _event(chunk)}},
        "headers": _HEADERS,
    }
    return {
        "responses": responses,
        "openapi_extra": {"requestBody": _body(request), "parameters": [_REQUEST_ID, _TIMEOUT, _TICKS]},
    }


def converts(request: type, document: type) -> dict[str, Any]:
    """The arguments that declare a route which converts between text and tokens: types of its body and its response."""
    responses = returns(document, 400, 401, 404, 408, 413, 415, 421, 429)
    return {"responses": responses, "openapi_extra": {"requestBody": _body(request), "parameters": [_REQUEST_ID]}}


def _body(request: type) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": _ref(request)}}}


def _event(chunk: type) -> dict[str, Any]:
    """An event of a stream, as OpenAPI 3.2 and FastAPI describe it."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(chunk)}
    about = "A chunk; the last event is `[DONE]`, or an error."
    return {"type": "object", "required": ["data"], "properties": {"data": data | {"description": about}}}


def complete(app: FastAPI, *, needs_key: bool) -> None:
    """Adds the types that routes refer to, and how clients authenticate, to the application's OpenAPI document."""
    declared = app.openapi

    def openapi() -> dict[str, Any]:
        document = declared()
        components = document.setdefault("components", {})
        if "securitySchemes" not in components:
            inputs = [(kind.__name__, "validation", TypeAdapter(kind)) for kind in _UNDECLARED]
            _, undeclared = TypeAdapter.json_schemas(inputs, ref_template=_REF)  # type: ignore[arg-type]
            components["schemas"] = undeclared["$defs"] | components.get("schemas", {})
            components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"api_key": []}] if needs_key else []
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}

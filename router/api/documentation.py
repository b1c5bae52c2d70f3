"""The parts of `/openapi.json` that FastAPI can't read from the endpoints' signatures.

The endpoints with a body parse their bodies themselves, so FastAPI does not know their types.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from router.api.responses import ChatCompletionChunk, TextCompletionChunk
from router.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.errors import ErrorResponse

DESCRIPTION = """An API compatible with OpenAI's and, for messages, with Anthropic's. A field that would change the
result is never ignored: it is honoured, or refused by name. A field that is `null` counts as left out."""

NO_KEY: dict[str, Any] = {"security": []}
"""For routes that need no API key."""

_ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The API key does not allow this.",
    404: "The model or request does not exist.",
    408: "The body did not arrive within a minute.",
    409: "The cluster, or the model, can't be changed like this, or is being changed already.",
    413: "The body is larger than `--max-body`.",
    415: "The body is not `application/json`, or is compressed.",
    421: "The `Host` header is not one that this server allows (`--allowed-hosts`).",
    429: "A limit of this tenant or client is reached; `Retry-After` says when to try again.",
    500: "A worker failed the request.",
    503: "No worker is ready, or it would take too long; `Retry-After` says when to try again.",
}

_REF = "#/components/schemas/{model}"


def any_error(error: type = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """The `responses` for all other errors, of a type."""
    return {"default": {"content": _error_body(error), "description": "Any other error, such as 405 or 431."}}


def _error_body(error: type) -> dict[str, Any]:
    # given as content, not as a model: FastAPI would declare models in the media type of the route's documents
    return {"application/json": {"schema": _ref(error)}}


_TEXT = {"schema": {"type": "string"}}
_HEADERS = {
    "x-request-id": _TEXT | {"description": "The client's own id, or a new one if it sent none or an invalid one."},
    "request-id": _TEXT | {"description": "The same id, under the name that Anthropic's clients read."},
    "x-cpd-route": {
        "schema": {"enum": ["local", "remote"]},
        "description": "Whether a prefill worker computed the first prompt (`remote`).",
    },
    "x-cpd-decode-worker": _TEXT | {"description": "The combined worker that ran the first prompt."},
    "x-cpd-prefill-worker": _TEXT | {"description": "The prefill worker, with the route `remote`."},
    "x-cpd-wake-ms": {
        "schema": {"type": "integer"},
        "description": "Time that the first prompt waited for its model to wake, in ms, if it did.",
    },
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


def returns(document: type, *error_statuses: int, error: type = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that returns a document or an error with one of these statuses.

    Args:
        error: Type of an error's body.
    """
    responses: dict[int | str, dict[str, Any]] = {200: {"model": document}}
    for status in error_statuses:
        responses[status] = {"content": _error_body(error), "description": _ERRORS[status]}
    return responses if error is ErrorResponse else responses | any_error(error)


def generates(
    request: type, whole: type, *events: type, ends: str = "`[DONE]`", error: type = ErrorResponse
) -> dict[str, Any]:
    """The arguments that declare a route which generates text.

    Args:
        request: Type of the request body.
        whole: Type of the response in one piece.
        events: Types of a stream's events; if there are several, events have a name.
        ends: The last event of a stream that does not fail.
        error: Type of an error's body.
    """
    responses = returns(whole, 400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503, error=error)
    responses[200] |= {
        "description": f"One document, or with `stream` server-sent events that end with {ends} or with an error.",
        "content": {"text/event-stream": {"itemSchema": _event(events, ends)}},
        "headers": _HEADERS,
    }
    return {
        "responses": responses,
        "openapi_extra": {"requestBody": _body(request), "parameters": [_REQUEST_ID, _TIMEOUT, _TICKS]},
    }


def converts(request: type, document: type, *, error: type = ErrorResponse) -> dict[str, Any]:
    """The arguments that declare a route which converts text to tokens or back.

    Args:
        request: Type of the request body.
        document: Type of the response.
        error: Type of an error's body.
    """
    responses = returns(document, 400, 401, 404, 408, 413, 415, 421, 429, error=error)
    return {"responses": responses, "openapi_extra": {"requestBody": _body(request), "parameters": [_REQUEST_ID]}}


def _body(request: type) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": _ref(request)}}}


def _event(kinds: Sequence[type], ends: str) -> dict[str, Any]:
    """An event of a stream, as OpenAPI 3.2 and FastAPI describe it."""
    schema = _ref(kinds[0]) if len(kinds) == 1 else {"anyOf": [_ref(kind) for kind in kinds]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    properties = {"data": data | {"description": f"The last event is {ends}, or an error."}}
    if len(kinds) > 1:
        properties["event"] = {"type": "string", "description": "The event's `type`."}
    return {"type": "object", "required": list(properties), "properties": properties}


def complete(app: FastAPI, types: Sequence[Any], *, needs_key: bool) -> None:
    """Adds the types that routes refer to, and how clients authenticate, to the application's OpenAPI document.

    Args:
        types: Types that routes of this application refer to, besides those of OpenAI's completions.
    """
    declared = app.openapi

    def openapi() -> dict[str, Any]:
        document = declared()
        components = document.setdefault("components", {})
        if "securitySchemes" not in components:
            inputs = [(kind.__name__, "validation", TypeAdapter(kind)) for kind in (*_UNDECLARED, *types)]
            _, undeclared = TypeAdapter.json_schemas(inputs, ref_template=_REF)  # type: ignore[arg-type]
            components["schemas"] = undeclared["$defs"] | components.get("schemas", {})
            components["securitySchemes"] = {
                "api_key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            document["security"] = [{"api_key": []}, {"x_api_key": []}] if needs_key else []
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}

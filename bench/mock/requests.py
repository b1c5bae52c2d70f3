"""Turns an HTTP request into the steps of its answer: routes, credentials, and the body."""

from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import ValidationError

from bench.mock.answer import CREATED, Request, Step, answer, error_response, json_response
from bench.mock.behaviour import Answering, Behaviour

DEFAULT_MAX_TOKENS = 16


Answered = tuple[Iterator[Step], Request | None]
"""The steps of an answer, and the request if it was one for text."""


class Requests:
    """Answers requests according to `behaviour`, which the field `mock` of a body overrides."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._defaults = behaviour.model_dump(include=set(Answering.model_fields))
        self._count = 0

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answered:
        """Answers any request except GET /sends. Names in `headers` are in lower case."""
        key = self._behaviour.api_key
        if key and headers.get("authorization") != f"Bearer {key}":
            return _now(error_response(401, "wrong API key"))
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": self._behaviour.model, "object": "model", "created": CREATED, "owned_by": "mock"}
            return _now(json_response(200, {"object": "list", "data": [model]}))
        if method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            return self._generate(path == "/v1/chat/completions", body)
        return _now(error_response(404, f"no such endpoint: {method} {path}"))

    def _generate(self, chat: bool, body: bytes) -> Answered:
        try:
            fields = orjson.loads(body)
            how = Answering.model_validate({**self._defaults, **fields.get("mock", {})})
            request = _request(self._count, chat, fields)
        except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError, AttributeError) as error:
            return _now(error_response(400, f"malformed request: {error}"))
        if request.model != self._behaviour.model:
            return _now(error_response(404, f"The model `{request.model}` does not exist."))
        self._count += 1
        return answer(request, how), request


def _request(number: int, chat: bool, fields: dict[str, Any]) -> Request:
    return Request(
        number=number,
        chat=chat,
        model=fields["model"],
        prompt="\n".join(message["content"] for message in fields["messages"]) if chat else fields["prompt"],
        max_tokens=fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_MAX_TOKENS,
        stream=fields.get("stream", False),
        include_usage=(fields.get("stream_options") or {}).get("include_usage", False),
    )


def _now(response: bytes) -> Answered:
    return iter([Step(0.0, response)]), None

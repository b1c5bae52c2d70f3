"""The routes of the Responses API."""

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from router.api.documentation import generates, returns
from router.api.gate import Endpoint
from router.api.intake import Intake, caller_of, json_response, tenant_of
from router.api.openai_responses.documents import EVENTS, DeletedResponse, ResponseDocument
from router.api.openai_responses.format import Keep, ResponsesFormat
from router.api.openai_responses.items import AnyItem, Item
from router.api.openai_responses.request import ResponsesRequest
from router.api.openai_responses.store import ResponseStore
from router.api.openai_responses.to_chat import to_chat
from router.api.parse import parse_body
from router.api.translation import named
from router.errors import invalid

RESPONSES_TYPES = (ResponsesRequest, *EVENTS)
"""The types that the routes refer to."""

_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[Item])


def add_responses(app: FastAPI, intake: Intake, store: ResponseStore | None) -> dict[str, Endpoint]:
    """Adds the routes. Returns the endpoints that read a body, by path.

    Args:
        store: None if responses are not stored.
    """

    @app.post("/v1/responses", **generates(ResponsesRequest, ResponseDocument, *EVENTS, ends="the whole response"))
    async def create_response(request: Request) -> Response:
        """Generates the next items of a conversation."""
        caller = caller_of(request)
        asked = await intake.read(request, partial(parse_body, kind=ResponsesRequest))
        service = intake.find(request, asked.model)
        earlier = await _earlier(store, asked, caller.tenant.name)
        defaults = service.sampling_defaults
        translated = await service.off_loop(lambda: to_chat(asked, _items(earlier), defaults), caller)
        form = partial(ResponsesFormat, asked=asked, keep=_keep(store, asked, earlier, caller.tenant.name))
        with named(translated.names):
            return await service.chat(translated.chat, caller, form)

    @app.get("/v1/responses/{response_id}", responses=returns(ResponseDocument, 400, 401, 404, 421, 503))
    async def get_response(request: Request, response_id: str) -> Response:
        """Returns a stored response, if the server stores them (`--store-responses`)."""
        if request.query_params.get("stream", "false") != "false":
            raise invalid("stream", "'stream' is not supported for stored responses.", code="unsupported_parameter")
        return json_response(await _stored(store).response(tenant_of(request).name, response_id))

    @app.delete("/v1/responses/{response_id}", responses=returns(DeletedResponse, 400, 401, 404, 421, 503))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Deletes a stored response, if the server stores them (`--store-responses`)."""
        await _stored(store).delete(tenant_of(request).name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return {"/v1/responses": create_response}


def _stored(store: ResponseStore | None, param: str | None = None) -> ResponseStore:
    """Raises ApiError if responses are not stored; `param` asked for it."""
    if store is None:
        message = "This server stores no responses; the operator can change that with --store-responses."
        message = f"'{param}' can't be used: {message}" if param is not None else message
        raise invalid(param, message, code="unsupported_parameter")
    return store


async def _earlier(store: ResponseStore | None, asked: ResponsesRequest, tenant: str) -> list[Any]:
    """Returns the items of the conversation before a request, as JSON.

    Raises:
        ApiError: It asks for what is not stored.
    """
    if asked.store:
        _stored(store, "store")
    if asked.previous_response_id is None:
        return []
    return await _stored(store, "previous_response_id").items(tenant, asked.previous_response_id)


def _items(stored: Sequence[Any]) -> Sequence[AnyItem]:
    try:
        return _ITEMS.validate_python(stored)
    except ValidationError:
        message = "The response of 'previous_response_id' was stored by another version of this server."
        raise invalid("previous_response_id", message) from None


def _keep(store: ResponseStore | None, asked: ResponsesRequest, earlier: Sequence[Any], tenant: str) -> Keep | None:
    """Returns what stores the response; None if it is not stored."""
    if store is None or asked.store is False:
        return None

    def keep(response: ResponseDocument) -> Awaitable[None]:
        own = [item.model_dump(exclude_unset=True) | {"type": item.type} for item in asked.items]
        return store.put(tenant, response, [*earlier, *own, *response["output"]])

    return keep

"""The HTTP interface: routes, and the one place where errors become responses."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.completion import Completion
from router.connection import connection_of
from router.errors import ApiError, failed, invalid, unavailable
from router.openai import Format
from router.overview import Overview
from router.requests import RETRY_S
from router.respond import CompletionResponse
from router.schemas import ChatRequest, CompletionRequest, GenerateRequest, parse
from router.service import Caller, Service
from router.siblings import Siblings
from router.tenants import Keys, Tenant

log = logging.getLogger(__name__)

BODY_S = 60.0
"""A client has this long to send its request, in seconds."""

_OPEN_PATHS = frozenset({"/livez", "/readyz"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

R = TypeVar("R", bound=GenerateRequest)
Start = Callable[[R, Caller], Awaitable[tuple[Completion, Format]]]


class ClientGoneError(Exception):
    """The client closed the connection while it sent its request."""


def create_app(service: Service, keys: Keys, siblings: Siblings | None) -> ASGIApp:
    """The router's ASGI application.

    Args:
        keys: Who may call.
        siblings: The other routers, for whom it answers too; None: it is that of the admin port, without the API.
    """
    settings, workers = service.settings, service.workers
    overview = Overview(service, siblings)
    created = int(time.time())

    def generate(kind: type[R], start: Start[R]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                async with asyncio.timeout(None if connection_of(scope).has_all else BODY_S):
                    body = await _read_body(scope, receive, settings.max_body)
            except TimeoutError:
                message = f"The body did not come within {BODY_S:g} s."
                raise invalid(None, message, code="request_timeout", status=408) from None
            call = parse(body, kind, max_n=settings.max_n, defaults=service.checkpoint.sampling)
            completion, form = await start(call, scope["state"]["caller"])
            response = CompletionResponse(
                completion, form, stream=call.stream, include_usage=call.include_usage, n=call.n
            )
            await response(scope, receive, send)

        return app

    def model_card() -> dict[str, object]:
        return {
            "id": service.checkpoint.name,
            "object": "model",
            "created": created,
            "owned_by": "cpd",
            "max_model_len": workers.max_model_len or None,
        }

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [model_card()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return _json(model_card())

    async def livez(request: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(request: Request) -> Response:
        if not workers.ready:
            raise unavailable("No worker is ready to serve the model.", RETRY_S)
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text = await overview.metrics(_caller(request).tenant, _authorization(request))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cluster(request: Request) -> Response:
        return _json(await overview.cluster(_caller(request).tenant, _authorization(request)))

    async def placements(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        return _json(await overview.placements(_caller(request).tenant, _authorization(request), request_id))

    def refuse(error: ApiError) -> Response:
        service.metrics.errors(error.code).inc()
        return Response(error.body(), error.status, headers=error.headers, media_type="application/json")

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refuse(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        message = f"{status.phrase}: {request.method} {request.url.path}"
        code = status.phrase.lower().replace(" ", "_")
        headers = error.headers
        return refuse(ApiError(status, message, kind="invalid_request_error", code=code, headers=headers))

    async def on_bug(request: Request, error: Exception) -> Response:
        return refuse(_bug())

    generating = {
        "/v1/chat/completions": generate(ChatRequest, service.chat),
        "/v1/completions": generate(CompletionRequest, service.complete),
    }
    api = [
        *(Route(path, app, methods=["POST"]) for path, app in generating.items()),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
    operators = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/cluster", cluster),
        Route("/requests/{request_id:path}", placements),
    ]
    app = Starlette(
        routes=[*api, *operators] if siblings is not None else operators,
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    return _Gate(app, generating if siblings is not None else {}, keys, refuse)


class _Gate:
    """In front of every route: the API key, and the id of the request.

    Args:
        app: Has all routes.
        generating: Those of its routes that nearly all requests are for, by path. Theirs don't take the way through the
            framework, which would be a tenth of what the router does for one.
        refuse: The response to an error.
    """

    def __init__(
        self, app: ASGIApp, generating: Mapping[str, ASGIApp], keys: Keys, refuse: Callable[[ApiError], Response]
    ) -> None:
        self._app = app
        self._generating = generating
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else f"req_{secrets.token_hex(16)}".encode()

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if scope["method"] == "POST":  # so that a body follows
                    connection_of(scope).hold()
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            open_to_all = scope["path"] in _OPEN_PATHS
            tenant = Tenant() if open_to_all else self._keys.tenant(headers.get(b"authorization", b""))
            scope["state"] = {
                **scope.get("state", {}),
                "caller": Caller(tenant, request_id.decode(), asyncio.get_running_loop().time()),
            }
            generate = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
            await (generate or self._app)(scope, receive, send_with_id)
        except ApiError as error:
            await self._refuse(error)(scope, receive, send_with_id)
        except ClientGoneError:
            return
        except Exception:
            if not started:
                await self._refuse(_bug())(scope, receive, send_with_id)
            raise  # to the HTTP server, which logs it


def _caller(request: Request) -> Caller:
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def _authorization(request: Request) -> bytes:
    return request.headers.get("authorization", "").encode("latin-1")


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: It is too large (413).
        ClientGoneError: It never came.
    """
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _bug() -> ApiError:
    return failed("The server made an error; its log has the details.")


def _too_large(max_bytes: int) -> ApiError:
    return invalid(None, f"The body is larger than {max_bytes} bytes.", code="request_too_large", status=413)


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")

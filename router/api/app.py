"""The HTTP API: its routes, and the one place where errors become responses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.metadata import version
from typing import TypeVar

import orjson
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from router.api.body import read_body
from router.api.documentation import ANY_ERROR, DESCRIPTION, NO_KEY, complete, generates, returns
from router.api.gate import Endpoint, Gate, internal_error
from router.api.openai import Format
from router.api.respond import CompletionResponse
from router.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    TextCompletionChunk,
)
from router.api.schemas import ChatRequest, CompletionRequest, GenerateRequest, parse
from router.api.service import Caller, Service
from router.api.tenants import Keys
from router.dispatch.completion import Completion
from router.dispatch.dispatcher import RETRY_S
from router.errors import ApiError, unavailable
from router.operations.overview import Overview, RequestPlacements, ScrapeTargets
from router.operations.peer_routers import PeerRouters
from router.operations.status import ClusterStatus

R = TypeVar("R", bound=GenerateRequest)
Start = Callable[[R, Caller], Awaitable[tuple[Completion, Format]]]


def create_app(service: Service, keys: Keys, peers: PeerRouters | None) -> ASGIApp:
    """The router's ASGI application.

    Args:
        keys: Who may call.
        peers: The other routers, for which it answers too; None for the admin port, which has no API.
    """

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
        return refuse(ApiError(status, message, kind="invalid_request_error", code=code, headers=error.headers))

    async def on_bug(request: Request, error: Exception) -> Response:
        return refuse(internal_error())

    app = FastAPIOffline(
        redoc_url=None,
        title="CPD",
        version=version("cpd"),
        description=DESCRIPTION,
        responses=dict(ANY_ERROR),
        swagger_ui_parameters={"validatorUrl": None},  # which would send the document to another host
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_error, Exception: on_bug},
    )
    generating = _add_api(app, service) if peers is not None else {}
    _add_operations(app, service, peers)
    complete(app, needs_key=keys.any)
    return Gate(app, generating, keys, refuse)


def _add_api(app: FastAPI, service: Service) -> dict[str, Endpoint]:
    """Adds the routes of OpenAI's API; returns the endpoints that generate, by path."""
    created = int(time.time())

    async def generate(request: Request, kind: type[R], start: Start[R]) -> Response:
        body = await read_body(request, service.settings.max_body)
        call = parse(body, kind, max_n=service.settings.max_n, defaults=service.sampling_defaults)
        completion, form = await start(call, _caller(request))
        return CompletionResponse(completion, form, call)

    @app.post("/v1/chat/completions", **generates(ChatRequest, ChatCompletion, ChatCompletionChunk))
    async def create_chat_completion(request: Request) -> Response:
        """The next message of a chat, through the model's own chat template."""
        return await generate(request, ChatRequest, service.chat)

    @app.post("/v1/completions", **generates(CompletionRequest, TextCompletion, TextCompletionChunk))
    async def create_completion(request: Request) -> Response:
        """The continuation of a text, or of several."""
        return await generate(request, CompletionRequest, service.complete)

    def model_card() -> ModelCard:
        return {
            "id": service.checkpoint.name,
            "object": "model",
            "created": created,
            "owned_by": "cpd",
            "max_model_len": service.workers.max_model_len or None,
        }

    @app.get("/v1/models", responses=returns(ModelList, 401))
    async def list_models() -> Response:
        """The model that is served, as a list."""
        return _json({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}", responses=returns(ModelCard, 401, 404))
    async def get_model(name: str) -> Response:
        """The model that is served."""
        service.check_model(name)
        return _json(model_card())

    return {"/v1/chat/completions": create_chat_completion, "/v1/completions": create_completion}


def _add_operations(app: FastAPI, service: Service, peers: PeerRouters | None) -> None:
    """Adds the routes for operators."""
    workers = service.workers
    overview = Overview(
        workers, service.dispatcher.decisions, peers, cluster=service.settings.cluster, model=service.checkpoint.name
    )

    @app.get("/livez", responses=returns(Health), openapi_extra=NO_KEY)
    async def is_live() -> Response:
        """The router runs."""
        return _json({"status": "ok"})

    @app.get("/readyz", responses=returns(Health, 503), openapi_extra=NO_KEY)
    async def is_ready() -> Response:
        """A combined worker is live, and the router knows what the workers have cached."""
        if not workers.ready:
            raise unavailable("No worker is ready to serve the model.", RETRY_S)
        return _json({"status": "ok"})

    @app.get("/metrics", responses=returns(str, 401, 403), response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """The metrics of the router that answers, in Prometheus' text format."""
        _caller(request).tenant.check_admin()
        text = await asyncio.to_thread(service.metrics.text)  # takes 0.2 s with a thousand workers
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/metrics/targets", responses=returns(list[ScrapeTargets], 401, 403))
    async def scrape_targets(request: Request) -> Response:
        """Where each router serves its own metrics, for Prometheus' HTTP service discovery."""
        _caller(request).tenant.check_admin()
        return _json(overview.scrape_targets())

    @app.get("/cluster", responses=returns(ClusterStatus, 401, 403))
    async def get_cluster(request: Request) -> Response:
        """Workers with their load and cache as each router sees them, and routers."""
        _caller(request).tenant.check_admin()
        return _json(await overview.cluster(_authorization(request)))

    @app.get("/requests/{request_id:path}", responses=returns(RequestPlacements, 401, 404))
    async def get_placements(request: Request, request_id: str) -> Response:
        """Where a recent request of the caller went, by its `x-request-id`."""
        tenant = _caller(request).tenant.name
        return _json(await overview.placements(tenant, _authorization(request), request_id))


def _caller(request: Request) -> Caller:
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def _authorization(request: Request) -> bytes:
    return request.headers.get("authorization", "").encode("latin-1")


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")

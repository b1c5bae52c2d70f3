"""The HTTP API: its routes, and the conversion of errors to responses."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from cpd.common.lifecycle import MAX_DRAIN_S, Lifecycle
from cpd.common.process import EXIT_DRAINED
from cpd.common.scaling import MAX_PROCESSES
from router.api.access_log import AccessLog
from router.api.allowed_hosts import AllowedHosts
from router.api.allowed_origins import allow_origins
from router.api.anthropic_messages.errors import error_body
from router.api.anthropic_messages.routes import MESSAGES_TYPES, add_messages
from router.api.client_limit import ClientLimit
from router.api.completions import CompletionService
from router.api.documentation import DESCRIPTION, NO_KEY, any_error, complete, converts, generates, returns
from router.api.gate import Endpoint, Gate, internal_error
from router.api.intake import Intake, caller_of, credentials_of, json_response, tenant_of
from router.api.live import LiveResponse
from router.api.models import Models
from router.api.openai_responses.routes import RESPONSES_TYPES, add_responses
from router.api.openai_responses.store import ResponseStore
from router.api.page import add_page
from router.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Detokenized,
    Draining,
    Health,
    ModelCard,
    ModelList,
    Scaled,
    TextCompletion,
    TextCompletionChunk,
    Tokenized,
    ToldWorkers,
    Version,
)
from router.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
    parse_conversion,
)
from router.api.tenant_limits import TenantLimits
from router.api.tenants import Keys
from router.api.tokenization import detokenize, tokenize
from router.dispatch.dispatcher import RETRY_S
from router.dispatch.roster import Roster
from router.errors import ApiError, invalid, unavailable
from router.operations.drains import Drains
from router.operations.feed import ClusterFeed
from router.operations.overview import ClusterUsage, Overview, RequestPlacements, ScrapeTargets
from router.operations.peer_routers import PeerRouters
from router.operations.planner_view import PlannerView, planner_view
from router.operations.residencies import Residencies
from router.operations.scaling import Scaling
from router.operations.status import ClusterStatus, Served
from router.request_metrics import RouterMetrics

if TYPE_CHECKING:
    from cpd.common.tracing import Tracing


def create_app(
    models: Models,
    roster: Roster,
    metrics: RouterMetrics,
    keys: Keys,
    hosts: AllowedHosts,
    clients: ClientLimit,
    peers: PeerRouters | None,
    lifecycle: Lifecycle,
    scaling: Scaling,
    responses: ResponseStore | None = None,
    tracing: "Tracing | None" = None,
) -> ASGIApp:
    """Creates the router's ASGI application.

    Args:
        models: The models that it serves.
        roster: The processes of the cluster.
        metrics: The metrics of this router.
        keys: The valid API keys.
        hosts: The allowed hosts.
        clients: Counts the connections of each client.
        peers: The other routers, whose answers are included; None for the admin port, which has no OpenAI routes, and
            where the router can be drained.
        scaling: Asks the launcher for other numbers of processes.
        responses: The stored responses; None if they are not stored.
        tracing: Sends the spans of calls; None without a collector.
    """

    def refuse(error: ApiError, path: str) -> Response:
        metrics.errors(error.code).inc()
        return Response(error_body(error, path), error.status, headers=error.headers, media_type="application/json")

    async def on_error(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, ApiError):
            return refuse(error, path)
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            name = str(first["loc"][-1])
            return refuse(invalid(name, f"Invalid value for '{name}': {first['msg']}."), path)
        if not isinstance(error, HTTPException):
            return refuse(internal_error(), path)
        status = HTTPStatus(error.status_code)
        message = f"{status.phrase}: {request.method} {path}"
        code = status.phrase.lower().replace(" ", "_")
        refused = ApiError(status, message, kind="invalid_request_error", code=code, headers=error.headers)
        return refuse(refused, path)

    app = FastAPIOffline(
        redoc_url=None,
        redirect_slashes=False,  # the redirection would go where the `Host` header says
        title="CPD",
        version=version("cpd"),
        description=DESCRIPTION,
        responses=any_error(),
        swagger_ui_parameters={"validatorUrl": None},  # which would send the document to another host
        exception_handlers=dict.fromkeys((ApiError, RequestValidationError, HTTPException, Exception), on_error),
    )
    generating = _add_api(app, models, responses) if peers is not None else {}
    served = [Served(one.name, one.aliases, one.workers, one.dispatcher.decisions) for one in models.services]
    overview = _add_operations(app, models, served, roster, metrics, peers, lifecycle)
    if peers is None:
        _add_drain(app, keys, lifecycle)
        _add_planner_view(app, models, keys)
    else:
        add_page(app, models, keys, roster.router_id)
        _add_live(app, overview, keys, lifecycle)
        workers = [one.workers for one in served]
        drains = Drains(roster, workers, peers, lifecycle, keys.admin_key)
        _add_changes(app, drains, Residencies(served, keys.admin_key), scaling, keys)
    complete(app, RESPONSES_TYPES + MESSAGES_TYPES, needs_key=keys.any)
    limits = TenantLimits(lambda: len(roster.routers))
    access = AccessLog(models.first.name if len(models.services) == 1 else "", metrics.activity)
    gate = Gate(app, generating, keys, hosts, limits, clients, refuse, access, tracing)
    return allow_origins(gate, models.first.settings.allowed_origins) if peers is not None else gate


def _add_api(app: FastAPI, models: Models, responses: ResponseStore | None) -> dict[str, Endpoint]:
    """Adds the routes that generate and convert text. Returns the endpoints that read a body, by path."""
    created, intake = int(time.time()), Intake(models)
    max_n, defaults = models.first.settings.max_n, models.sampling_defaults

    @app.post("/v1/chat/completions", **generates(ChatRequest, ChatCompletion, ChatCompletionChunk))
    async def create_chat_completion(request: Request) -> Response:
        """Generates the next message of a chat, with the model's own chat template."""
        asked = await intake.read(request, partial(parse, kind=ChatRequest, max_n=max_n, defaults=defaults))
        return await intake.find(request, asked.model).chat(asked, caller_of(request))

    @app.post("/v1/completions", **generates(CompletionRequest, TextCompletion, TextCompletionChunk))
    async def create_completion(request: Request) -> Response:
        """Continues a text, or several."""
        asked = await intake.read(request, partial(parse, kind=CompletionRequest, max_n=max_n, defaults=defaults))
        return await intake.find(request, asked.model).complete(asked, caller_of(request))

    @app.post("/tokenize", **converts(TokenizeRequest, Tokenized))
    async def get_tokens(request: Request) -> Response:
        """Converts a text, or a chat by the model's own chat template, to tokens."""
        asked = await intake.read(request, partial(parse_conversion, kind=TokenizeRequest))
        return json_response(await tokenize(intake.find(request, asked.model), asked, caller_of(request)))

    @app.post("/detokenize", **converts(DetokenizeRequest, Detokenized))
    async def get_text(request: Request) -> Response:
        """Converts tokens to text."""
        asked = await intake.read(request, partial(parse_conversion, kind=DetokenizeRequest))
        return json_response(await detokenize(intake.find(request, asked.model), asked, caller_of(request)))

    def model_card(service: CompletionService) -> ModelCard:
        return {
            "id": service.name,
            "object": "model",
            "created": created,
            "owned_by": "cpd",
            "max_model_len": service.workers.model.max_model_len or None,
            "state": service.workers.residency,
        }

    @app.get("/v1/models", responses=returns(ModelList, 401, 421))
    async def list_models(request: Request) -> Response:
        """Lists the models that this server has, and that the API key may use."""
        return json_response(
            {"object": "list", "data": [model_card(one) for one in models.allowed(tenant_of(request))]}
        )

    @app.get("/v1/models/{name:path}", responses=returns(ModelCard, 401, 404, 421))
    async def get_model(request: Request, name: str) -> Response:
        """Describes a model, by its name or an alias."""
        return json_response(model_card(models.find(name, tenant_of(request))))

    return {
        "/v1/chat/completions": create_chat_completion,
        "/v1/completions": create_completion,
        "/tokenize": get_tokens,
        "/detokenize": get_text,
        **add_responses(app, intake, responses),
        **add_messages(app, intake),
    }


def _add_drain(app: FastAPI, keys: Keys, lifecycle: Lifecycle) -> None:
    """Adds the route that drains the router."""

    @app.post("/drain", responses=returns(Draining, 400, 401, 403, 421))
    async def drain(
        request: Request, timeout_s: Annotated[float | None, Query(ge=0, le=MAX_DRAIN_S)] = None
    ) -> Response:
        """Starts to drain this router: it serves until nobody sends any more, at most for `timeout_s` (default:
        `--drain-s`), and ends."""
        keys.check_operator(credentials_of(request))
        lifecycle.drain("asked to", EXIT_DRAINED, timeout_s)
        return json_response({"status": "draining"})


def _add_live(app: FastAPI, overview: Overview, keys: Keys, lifecycle: Lifecycle) -> None:
    """Adds the route by which the page follows the cluster."""
    feed = ClusterFeed(overview, f"Bearer {keys.admin_key}".encode(), lifecycle.draining)

    @app.get("/cluster/live", include_in_schema=False)
    async def follow_cluster(request: Request) -> Response:
        """The documents of `/cluster` as server-sent events, one a second at most."""
        tenant_of(request).check_admin()
        if lifecycle.draining.is_set():
            return _not_ready("The router drains.")
        return LiveResponse(feed)


def _add_changes(app: FastAPI, drains: Drains, residencies: Residencies, scaling: Scaling, keys: Keys) -> None:
    """Adds the routes by which an operator changes the cluster."""
    name_of = Query(min_length=1, max_length=253)

    @app.post("/cluster/drain", responses=returns(Draining, 400, 401, 403, 404, 421, 503))
    async def drain_process(request: Request, name: Annotated[str, name_of]) -> Response:
        """Starts to drain a worker or router: it takes nothing new, finishes what it has and ends for good."""
        keys.check_operator(credentials_of(request))
        await drains.start(name, credentials_of(request))
        return json_response({"status": "draining"})

    @app.post("/cluster/sleep", responses=returns(ToldWorkers, 400, 401, 403, 404, 409, 421, 503))
    async def sleep(request: Request, name: Annotated[str, name_of]) -> Response:
        """Sends a model, or one of its workers, to sleep when its requests have ended, or are parked."""
        keys.check_operator(credentials_of(request))
        return json_response({"told": await residencies.sleep(name)})

    @app.post("/cluster/wake", responses=returns(ToldWorkers, 400, 401, 403, 404, 409, 421, 503))
    async def wake(request: Request, name: Annotated[str, name_of]) -> Response:
        """Wakes a model, or one of its workers, as a request would."""
        keys.check_operator(credentials_of(request))
        return json_response({"told": await residencies.wake(name)})

    @app.post("/cluster/pin", responses=returns(ToldWorkers, 400, 401, 403, 404, 409, 421, 503))
    async def pin(request: Request, name: Annotated[str, name_of], *, pinned: bool = True) -> Response:
        """Pins a model, or one of its workers, or ends that: while pinned no other model displaces it."""
        keys.check_operator(credentials_of(request))
        return json_response({"told": await residencies.pin(name, pinned=pinned)})

    at_least_one, at_least_none = (Query(ge=least, le=MAX_PROCESSES) for least in (1, 0))

    @app.post("/cluster/scale", responses=returns(Scaled, 400, 401, 403, 409, 421, 503))
    async def scale(
        request: Request,
        model: Annotated[str, Query(max_length=253)] = "",
        combined: Annotated[int | None, at_least_one] = None,
        prefill: Annotated[int | None, at_least_none] = None,
        routers: Annotated[int | None, at_least_one] = None,
    ) -> Response:
        """Begins to start or end workers and routers until there are as many. What is left out stays as it is.
        `scaling` in the cluster's state shows the steps, and the error if it fails."""
        keys.check_operator(credentials_of(request))
        await scaling.ask(model, combined, prefill, routers)
        return json_response({"status": "changing"})


def _add_planner_view(app: FastAPI, models: Models, keys: Keys) -> None:
    """Adds the route by which the planner sees what arrives."""

    @app.get("/load", responses=returns(PlannerView, 401, 403, 421))
    async def get_load(request: Request) -> Response:
        """The requests that this router has counted, and the workers that are ready, for the planner."""
        keys.check_operator(credentials_of(request))
        if len(models.services) > 1:
            raise invalid(None, "The planner works for one model only.", code="several_models", status=409)
        service, settings = models.first, models.first.settings
        view = planner_view(service.workers, service.dispatcher.arrivals, settings.slo_ttft, settings.slo_itl)
        return json_response(view)


def _add_operations(
    app: FastAPI,
    models: Models,
    served: Sequence[Served],
    roster: Roster,
    metrics: RouterMetrics,
    peers: PeerRouters | None,
    lifecycle: Lifecycle,
) -> Overview:
    """Adds the routes for operators. Returns what answers them."""
    overview = Overview(
        roster, served, peers, metrics.usage.tenants, cluster=models.first.settings.cluster, ready=lambda: models.ready
    )

    @app.get("/livez", responses=returns(Health), openapi_extra=NO_KEY)
    async def is_live() -> Response:
        """Answers as long as the router runs."""
        return json_response({"status": "ok"})

    @app.get("/readyz", responses=returns(Health, 503), openapi_extra=NO_KEY)
    @app.get("/health", responses=returns(Health, 503), openapi_extra=NO_KEY)
    @app.get("/ping", responses=returns(Health, 503), openapi_extra=NO_KEY)
    async def is_ready() -> Response:
        """Succeeds if a combined worker, of any model, is live and the router knows the cached blocks of all workers
        and does not drain. `/health` and `/ping` are the same under the names that other servers have."""
        if lifecycle.draining.is_set():
            return _not_ready("The router drains.")
        if not models.ready:
            return _not_ready("No worker is ready to serve the model.")
        return json_response({"status": "ok"})

    @app.get("/version", responses=returns(Version, 401, 421))
    async def get_version() -> Response:
        """The version of this server."""
        return json_response({"version": app.version})

    @app.get("/metrics", responses=returns(str, 401, 403, 421), response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> Response:
        """Metrics of the router that answers, in Prometheus' text format."""
        tenant_of(request).check_admin()
        text = await asyncio.to_thread(metrics.text)  # takes 0.2 s with a thousand workers
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/metrics/targets", responses=returns(list[ScrapeTargets], 401, 403, 421))
    async def scrape_targets(request: Request) -> Response:
        """Admin ports of all routers, for Prometheus' HTTP service discovery."""
        tenant_of(request).check_admin()
        return json_response(overview.scrape_targets())

    @app.get("/cluster", responses=returns(ClusterStatus, 401, 403, 421))
    async def get_cluster(request: Request) -> Response:
        """State of the cluster: all routers, and all workers as each router sees them."""
        tenant_of(request).check_admin()
        return json_response(await overview.cluster(credentials_of(request)))

    @app.get("/usage", responses=returns(ClusterUsage, 401, 403, 421))
    async def get_usage(request: Request) -> Response:
        """What each tenant has used since the routers started: calls and tokens."""
        tenant_of(request).check_admin()
        return json_response(await overview.usage(credentials_of(request)))

    @app.get("/requests/{request_id:path}", responses=returns(RequestPlacements, 401, 404, 421))
    async def get_placements(request: Request, request_id: str) -> Response:
        """Shows where a recent request of the caller went, by its `x-request-id`."""
        tenant, sent = tenant_of(request), credentials_of(request)
        return json_response(await overview.placements(tenant.name, sent, request_id, internals=tenant.admin))

    return overview


def _not_ready(message: str) -> Response:
    """The answer to probes and the page. It is not raised, as it is no error to count: they ask until it is ready."""
    error = unavailable(message, RETRY_S)
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")

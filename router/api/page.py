"""The routes of the page: its files, and what the holder of a key may do there."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from router.api.completions import CompletionService
from router.api.documentation import returns
from router.api.intake import json_response, tenant_of
from router.api.models import Models
from router.api.tenants import Keys, Tenant
from router.page import page_files
from router.placement.worker_load import Residency

PAGE_FILES = "/page/"
"""Prefix of the paths of the page's files, except its start, which is `/`."""

_CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only files of this server run and load, nothing inline, and no text becomes HTML or code: what a model writes can't
do anything, whatever a browser thinks of it."""

_HEADERS = {
    "content-security-policy": _CONTENT_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 while they are the same
}


class SessionModel(TypedDict):
    """A model that the caller may use.

    `ready`: a worker takes its requests. `state`: whether it sleeps, as in `/v1/models`. `defaults` are the sampling
    fields whose defaults differ from OpenAI's.
    """

    name: str
    aliases: list[str]
    ready: bool
    state: Residency | None
    max_model_len: int | None
    defaults: dict[str, float]


class Session(TypedDict):
    """What the caller may do.

    `tenant` is the name of the key's owner, empty without keys. `keys`: calls need a key. `admin`: the caller may see
    the cluster. `operator`: the caller may change it: drain, scale, send models to sleep.
    """

    tenant: str
    keys: bool
    admin: bool
    operator: bool
    router: str
    version: str
    models: list[SessionModel]


def add_page(app: FastAPI, models: Models, keys: Keys, router_id: str) -> None:
    """Adds the page's files and `GET /session`."""
    known = page_files(needs_key=keys.any)

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        return _file(request, "index.html")

    @app.get(PAGE_FILES + "{name}", include_in_schema=False)
    async def get_file(request: Request, name: str) -> Response:
        return _file(request, name)

    def _file(request: Request, name: str) -> Response:
        found = known.get(name)
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = {**_HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)

    @app.get("/session", responses=returns(Session, 401, 421))
    async def get_session(request: Request) -> Response:
        """What the API key may do, and the models that it may use, with their state. The page at `/` asks this."""
        return json_response(_session(tenant_of(request), models, keys, router_id, app.version))


def _session(tenant: Tenant, models: Models, keys: Keys, router_id: str, version: str) -> Session:
    return {
        "tenant": tenant.name,
        "keys": keys.any,
        "admin": tenant.admin,
        "operator": keys.is_operator(tenant),
        "router": router_id,
        "version": version,
        "models": [_model(one) for one in models.allowed(tenant)],
    }


def _model(service: CompletionService) -> SessionModel:
    defaults: Mapping[str, Any] = service.sampling_defaults
    return {
        "name": service.name,
        "aliases": list(service.aliases),
        "ready": service.workers.ready,
        "state": service.workers.residency,
        "max_model_len": service.workers.model.max_model_len or None,
        "defaults": dict(defaults),
    }

"""What every endpoint with a body does first: it reads the body, and finds the model and who calls."""

from collections.abc import Callable
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import read_body
from router.api.completions import Caller, CompletionService
from router.api.models import Models
from router.api.tenants import Tenant

T = TypeVar("T")


class Intake:
    """Reads bodies.

    Args:
        models: The models that the router serves.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._max_body, self._off_loop = models.first.settings.max_body, models.first.off_loop

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Returns what `parse` makes of a request's body.

        Raises:
            ApiError: The body can't be read, or is not valid.
        """
        caller = caller_of(request)
        body = await read_body(request, self._max_body, caller.admission.hold)
        return await self._off_loop(lambda: parse(body), caller)

    def find(self, request: Request, name: str | None) -> CompletionService:
        """Returns the model that a request names.

        Raises:
            ApiError: See `Models.find`.
        """
        service = self._models.find(name, tenant_of(request))
        request.scope["state"]["model"] = service.name
        return service


def caller_of(request: Request) -> Caller:
    """The caller of a route that generates or converts text."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def tenant_of(request: Request) -> Tenant:
    """The tenant of any route that needs a key."""
    tenant = request.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def credentials_of(request: Request) -> bytes:
    """What the caller of any route that needs a key proves itself with, as an `Authorization` header."""
    credentials = request.scope["state"]["credentials"]
    assert isinstance(credentials, bytes)
    return credentials


def json_response(content: object) -> Response:
    """A response with a JSON document."""
    return Response(orjson.dumps(content), media_type="application/json")

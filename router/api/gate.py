"""The ASGI application in front of all routes: host, API key, request id, and direct calls of the generating routes."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.access_log import AccessLog, CallStart
from router.api.allowed_hosts import AllowedHosts
from router.api.body import ClientGoneError
from router.api.call_traces import end_call
from router.api.client_limit import ClientLimit
from router.api.completions import Caller
from router.api.connection import connection_of
from router.api.page import PAGE_FILES
from router.api.respond import CompletionResponse
from router.api.tenant_limits import TenantLimits
from router.api.tenants import API_KEY_HEADER, Keys, Tenant, credentials
from router.errors import ApiError, failed, invalid

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan, Tracing

Endpoint = Callable[[Request], Awaitable[Response]]

_OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/docs", "/openapi.json"})
"""Paths that need no API key and are served for any host, as load balancers probe by address."""

_ID_HEADERS = (b"x-request-id", b"request-id")
"""The headers of a response from which OpenAI's and Anthropic's clients read the request's id."""

TIMEOUT_HEADER = b"x-request-timeout-ms"
"""With a generating call: the time from its arrival for which a first token is of use to the client."""

TICKS_HEADER = b"x-cpd-ticks"
"""With a generating call: if it is `1`, `GET /requests/{id}` has the time of each token."""

_TRACE_HEADERS = ("traceparent", "tracestate")

_MILLISECONDS = re.compile(rb"[1-9][0-9]{0,8}")

_SINGLE_HEADERS = frozenset(
    {b"host", b"authorization", API_KEY_HEADER, b"content-type", b"content-encoding", TIMEOUT_HEADER}
)
"""Headers that a request may have only once: a proxy before this server could have checked the other one."""

_DOCS_ASSETS = "/static-offline-docs/"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class Gate:
    """Checks the host and the API key, sets the request id and calls the route.

    Args:
        app: The application with all routes.
        generating: Endpoints of the POST routes that generate or convert text, by path. They are called directly: the
            framework's middleware and routing would be a tenth of the router's work for a request.
        keys: The valid API keys.
        hosts: The allowed hosts.
        limits: Counts what tenants use of their limits.
        clients: Counts the connections of each client.
        refuse: Creates the response for an error of a path.
        access: Gets each call of a generating route when it has ended.
        tracing: Sends the spans of these calls; None without a collector.
    """

    def __init__(
        self,
        app: ASGIApp,
        generating: Mapping[str, Endpoint],
        keys: Keys,
        hosts: AllowedHosts,
        limits: TenantLimits,
        clients: ClientLimit,
        refuse: Callable[[ApiError, str], Response],
        access: AccessLog,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._app = app
        self._generating = generating
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._clients = clients
        self._refuse = refuse
        self._access = access
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else f"req_{secrets.token_hex(16)}".encode()
        loop = asyncio.get_running_loop()
        now = loop.time()
        status, tenant, admission, client = 0, Tenant(), None, None
        proof = credentials(headers)
        generates = scope["method"] == "POST" and scope["path"] in self._generating

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if scope["method"] == "POST":  # a body follows
                    connection_of(scope).hold()
                limits = self._limits.headers(tenant, loop.time()) if generates else ()
                ids = [(name, request_id) for name in _ID_HEADERS]
                message["headers"] = [*message["headers"], *ids, *limits]
            await send(message)

        response: Response | None = None
        trace: TracedSpan | None = None
        outcome, code = "error", ""
        try:
            if len(headers) < len(scope["headers"]):
                _check_repeated(scope["headers"])
            path = scope["path"]
            if path not in _OPEN_PATHS and not path.startswith(_DOCS_ASSETS):
                self._hosts.check(headers.get(b"host", b""))
                if path != "/" and not path.startswith(PAGE_FILES):  # the page asks for the key
                    tenant = self._keys.tenant(proof)
            peer, sent = scope["client"], scope["headers"]
            if peer and (named := self._clients.forwarded_client(peer[0], sent)) is not None:
                self._clients.open(named)
                client = named
            scope["state"] = {**scope.get("state", {}), "tenant": tenant, "credentials": proof}
            if scope["method"] == "HEAD":  # handled as GET; the HTTP server leaves the body out
                scope = {**scope, "method": "GET"}
            if not generates:
                await self._app(scope, receive, send_with_id)
                return
            admission = self._limits.admit(tenant, now)
            ticks = headers.get(TICKS_HEADER) == b"1"
            if self._tracing is not None:
                about = {"cpd.request_id": request_id.decode(), "cpd.tenant": tenant.name}
                trace = self._tracing.begin(scope["path"], now, _trace_context(headers), about)
            caller = Caller(tenant, request_id.decode(), now, admission, now + _timeout_s(headers), ticks, trace)
            scope["state"]["caller"] = caller
            response = await self._generating[scope["path"]](Request(scope, receive))
            admission.release_body()
            await response(scope, receive, send_with_id)
            outcome = "completed"
        except ApiError as error:
            # the traceback's frames refer to the response, which refers to the error: only a garbage collection would
            # free the prompt
            error.__traceback__ = None
            code = error.code
            await self._refuse(error, scope["path"])(scope, receive, send_with_id)
        except ClientGoneError:
            outcome = "client_gone"
        except Exception:
            code = internal_error().code
            if not status:
                await self._refuse(internal_error(), scope["path"])(scope, receive, send_with_id)
            elif isinstance(response, CompletionResponse):
                await response.break_off(internal_error(), send)
            raise  # to the HTTP server, which logs it
        finally:
            if admission is not None:
                admission.end(loop.time())
            if client is not None:
                self._clients.close(client)
            if generates:
                call = response if isinstance(response, CompletionResponse) else None
                if call is not None:
                    outcome, code = call.outcome, call.error.code if call.error is not None else code
                model = scope.get("state", {}).get("model", "")
                call_start = CallStart(scope["path"], request_id.decode(), tenant.name, now, model)
                self._access.add(call_start, status=status, outcome=outcome, code=code, response=call)
                if trace is not None:
                    end_call(trace, call, status=status, outcome=outcome, code=code)


def _check_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises ApiError (400) if a header is repeated of which there may be only one."""
    seen = set[bytes]()
    for name, _ in headers:
        if name in _SINGLE_HEADERS and name in seen:
            message = f"The request has the header '{name.decode()}' more than once."
            raise invalid(None, message, code="invalid_http")
        seen.add(name)


def _trace_context(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers}


def _timeout_s(headers: Mapping[bytes, bytes]) -> float:
    """Time that the client gives the first token.

    Raises:
        ApiError: The header is not a number of milliseconds (400).
    """
    sent = headers.get(TIMEOUT_HEADER)
    if sent is None:
        return inf
    if not _MILLISECONDS.fullmatch(sent):
        message = "The header 'x-request-timeout-ms' must be a whole number of milliseconds, from 1 to 999999999."
        raise invalid(None, message)
    return int(sent) / 1e3


def internal_error() -> ApiError:
    """The error for a request that met a bug."""
    return failed("Internal error; the server's log has the details.")

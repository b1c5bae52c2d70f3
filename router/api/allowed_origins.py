"""CORS: the web pages of other sites that may use the API in a browser."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_EXPOSED = (
    *("retry-after", "x-request-id", "request-id"),
    *("x-cpd-route", "x-cpd-decode-worker", "x-cpd-prefill-worker", "x-cpd-wake-ms"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of responses that pages may read."""


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application with the permission for browsers; the same one if there are no origins.

    Args:
        origins: Schemes and hosts of the sites; `*` allows any.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )

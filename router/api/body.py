"""Reads a request's body, with limits on size and time."""

import asyncio

from starlette.requests import Request

from router.api.connection import connection_of
from router.errors import ApiError, invalid

BODY_S = 60.0
"""Time limit for a request's body, in seconds."""


class ClientGoneError(Exception):
    """The client closed the connection before it had sent the whole request."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Reads the request's body.

    Raises:
        ApiError: The body is too large (413) or did not arrive within BODY_S (408).
        ClientGoneError: The client hung up.
    """
    try:
        async with asyncio.timeout(None if connection_of(request.scope).has_all else BODY_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_S:g} s."
        raise invalid(None, message, code="request_timeout", status=408) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = next((value for name, value in request.scope["headers"] if name == b"content-length"), b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return invalid(None, f"The body is larger than {max_bytes} bytes.", code="request_too_large", status=413)

"""Reads a request's body, which must be JSON, with limits on size and time.

The media type is checked because a web page may send any other one to a server on the user's machine: for
`application/json` the browser first asks the server for permission (CORS preflight), and is refused.
"""

import asyncio
from collections.abc import Callable, Mapping

from starlette.requests import Request

from router.api.connection import connection_of
from router.errors import ApiError, invalid, one_line

BODY_S = 60.0
"""Time limit for a request's body, in seconds."""


class ClientGoneError(Exception):
    """The client closed the connection before it had sent the whole request."""


async def read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Reads the request's body. Calls `hold` with the size of each piece.

    Raises:
        ApiError: The body is not `application/json` or is compressed (415), has an unknown transfer encoding (400), is
            too large (413) or did not arrive within BODY_S (408).
        ClientGoneError: The client hung up.
    """
    headers = dict(request.scope["headers"])
    _check_format(headers)
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    if connection_of(request.scope).has_all:
        return await _read(request, max_bytes, hold)
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, max_bytes, hold)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_S:g} s."
        raise invalid(None, message, code="request_timeout", status=408) from None


def _check_format(headers: Mapping[bytes, bytes]) -> None:
    content_type = headers.get(b"content-type", b"")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        has = f"'{_shown(content_type)}'" if content_type else "none"
        message = f"Send JSON with the header 'Content-Type: application/json'; this request has {has}."
        raise invalid(None, message, code="unsupported_media_type", status=415)
    content_encoding = headers.get(b"content-encoding", b"identity")
    if content_encoding.lower() != b"identity":
        message = f"The Content-Encoding '{_shown(content_encoding)}' is not supported; send the body uncompressed."
        raise invalid(None, message, code="unsupported_media_type", status=415)
    transfer_encoding = headers.get(b"transfer-encoding", b"chunked")
    if transfer_encoding.lower() != b"chunked":
        message = f"The Transfer-Encoding '{_shown(transfer_encoding)}' is not supported; use 'chunked' or none."
        raise invalid(None, message, code="invalid_http")


async def _read(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytes:
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
        hold(len(parts[-1]))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _shown(header: bytes) -> str:
    return one_line(header.decode("latin-1"))


def _too_large(max_bytes: int) -> ApiError:
    return invalid(None, f"The body is larger than {max_bytes} bytes.", code="request_too_large", status=413)

"""Every call to a worker carries the cluster's secret: `authorization: Bearer <cluster token>`."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

HEADER = "authorization"
HEALTH_SERVICE = "/grpc.health.v1.Health/"


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that a call to a worker carries."""
    return ((HEADER, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token. The health service answers everyone: probes can't carry metadata.

    Args:
        token: The secret; empty lets every call in.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Passes an authorised call on and answers the others with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if (
            handler is None
            or handler_call_details.method.startswith(HEALTH_SERVICE)
            or self._known(handler_call_details)
        ):
            return handler
        return _refusing(handler)

    def _known(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get(HEADER, "")
        data = given if isinstance(given, bytes) else given.encode()
        return not self._expected or hmac.compare_digest(data, self._expected)


def _refusing(handler: "grpc.RpcMethodHandler[Any, Any]") -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that refuses."""

    async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")

    return grpc.unary_unary_rpc_method_handler(refuse, handler.request_deserializer, handler.response_serializer)

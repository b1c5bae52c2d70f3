"""The gRPC calls to workers (administration and health checks): authentication and connection options.

Each call carries the cluster's admin key: `authorization: Bearer <admin key>`.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cpd.common.tls import SERVER_NAME, fetch_certificate, split_address, without_fingerprint

HEADER = "authorization"
HEALTH_SERVICE = "/grpc.health.v1.Health/"

# A broken host or a stopped process is noticed after at most the sum of both. The keepalive timeout alone relies on
# TCP, and the kernel of a stopped process still acknowledges: the ping timeout counts missing answers.
KEEPALIVE_MS = 3_000
KEEPALIVE_TIMEOUT_MS = 5_000

_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS = (
    *_KEEPALIVE_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # the environment's proxy is for the outside world
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
SERVER_OPTIONS = (
    *_KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
)


def admin_channel(address: str, timeout_s: float) -> grpc.Channel:
    """Opens a channel to a worker, with TLS if its address names a certificate. Blocks.

    Raises:
        OSError: It can't be reached, or has another certificate.
    """
    host, port, fingerprint = split_address(address)
    if not fingerprint:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(fetch_certificate(host, port, fingerprint, timeout_s))
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.secure_channel(without_fingerprint(address), credentials, options=options)


def admin_metadata(admin_key: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call to a worker."""
    return ((HEADER, f"Bearer {admin_key}"),)


class AdminKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the admin key. The health service answers everyone, because probes can't carry metadata.

    Args:
        admin_key: The cluster's admin key; empty admits every call.
    """

    def __init__(self, admin_key: str) -> None:
        self._expected = f"Bearer {admin_key}".encode() if admin_key else b""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Passes an authorised call on and answers others with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        public = handler_call_details.method.startswith(HEALTH_SERVICE)
        if handler is None or public or self._authorised(handler_call_details):
            return handler
        return _refusing(handler)

    def _authorised(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get(HEADER, "")
        data = given if isinstance(given, bytes) else given.encode()
        return not self._expected or hmac.compare_digest(data, self._expected)


def _refusing(handler: "grpc.RpcMethodHandler[Any, Any]") -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster's admin key is missing or wrong")

    return grpc.unary_unary_rpc_method_handler(refuse, handler.request_deserializer, handler.response_serializer)

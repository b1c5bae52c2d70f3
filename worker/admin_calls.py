"""Calls of a worker's administration service (`worker/admin.py`)."""

import grpc

from cpd.common.errors import CPDError
from cpd.common.tls import without_fingerprint
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from worker.grpc_options import admin_channel, admin_metadata

_TIMEOUT_S = 10.0


def drain_worker(name: str, address: str, admin_key: str, timeout_s: float | None) -> None:
    """Tells a worker to drain. Blocks.

    Args:
        address: `host:port` of its gRPC port, with TLS `host:port#fingerprint`.
        timeout_s: Time for running requests to end by themselves; None: the worker's `--drain-s`.

    Raises:
        CPDError: It does not answer, or refuses.
    """
    request = pb.DrainRequest(timeout_s=timeout_s)
    try:
        with admin_channel(address, _TIMEOUT_S) as channel:
            rpc.AdminStub(channel).Drain(request, metadata=admin_metadata(admin_key), timeout=_TIMEOUT_S)
    except (grpc.RpcError, OSError) as error:
        reason = error.details() if isinstance(error, grpc.RpcError) else error
        raise CPDError(f"worker {name} at {without_fingerprint(address)} does not answer: {reason}") from None

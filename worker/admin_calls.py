"""Calls of a worker's administration service (`worker/admin.py`)."""

from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from cpd.common.errors import CPDError
from cpd.common.settings import Role
from cpd.common.tls import without_fingerprint
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from worker.grpc_options import admin_channel, admin_metadata

_TIMEOUT_S = 10.0
_ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}

T = TypeVar("T")

AdminCall = Callable[[str, str, str], None]
"""Makes a call: gets a worker's name, `host:port` of its gRPC port (with TLS `host:port#fingerprint`) and the cluster's
admin key. Blocks. Raises CPDError if the worker does not answer, refuses or is too old."""


def drain_worker(name: str, address: str, admin_key: str, timeout_s: float | None) -> None:
    """Tells a worker to drain: an `AdminCall`.

    Args:
        timeout_s: Time for running requests to end by themselves; None: the worker's `--drain-s`.
    """
    request = pb.DrainRequest(timeout_s=timeout_s)
    _call(name, address, admin_key, lambda stub: stub.Drain, request, "drain on request")


def set_role(name: str, address: str, admin_key: str, role: Role) -> None:
    """Tells a worker its role: an `AdminCall`."""
    request = pb.SetRoleRequest(role=_ROLES[role])
    _call(name, address, admin_key, lambda stub: stub.SetRole, request, "change its role")


def sleep_worker(name: str, address: str, admin_key: str) -> None:
    """Sends a worker's model to sleep: an `AdminCall`."""
    _call(name, address, admin_key, lambda stub: stub.Sleep, pb.SleepRequest(), "sleep")


def wake_worker(name: str, address: str, admin_key: str) -> None:
    """Wakes a worker's model, as a request would: an `AdminCall`."""
    _call(name, address, admin_key, lambda stub: stub.Wake, pb.WakeRequest(), "sleep")


def pin_worker(name: str, address: str, admin_key: str, *, pinned: bool) -> None:
    """Says whether other models may displace that of a worker: an `AdminCall`."""
    _call(name, address, admin_key, lambda stub: stub.Pin, pb.PinRequest(pinned=pinned), "sleep")


def _call(
    name: str,
    address: str,
    admin_key: str,
    method: Callable[[rpc.AdminStub], "grpc.UnaryUnaryMultiCallable[T, Any]"],
    request: T,
    ability: str,
) -> None:
    """Calls a worker. `ability`: what a worker can't do that does not know the call."""
    try:
        with admin_channel(address, _TIMEOUT_S) as channel:
            method(rpc.AdminStub(channel))(request, metadata=admin_metadata(admin_key), timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise CPDError(f"worker {name} is of an older version, which can't {ability}") from None
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise CPDError(f"worker {name} refuses: {error.details()}") from None
        raise CPDError(f"worker {name} at {without_fingerprint(address)} does not answer: {error.details()}") from None
    except OSError as error:
        raise CPDError(f"worker {name} at {without_fingerprint(address)} does not answer: {error}") from None

"""`cpd role`: changes the role of a worker of a running cluster, while it runs."""

import sys

import grpc

from cpd.common.errors import CPDError
from cpd.common.settings import Role
from cpd.common.tls import without_fingerprint
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster
from worker.grpc_options import admin_channel, admin_metadata

_TIMEOUT_S = 10.0
_ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}


def change_role(cluster: str, name: str, role: Role) -> None:
    """Changes the role of a worker.

    Raises:
        CPDError: There is no such cluster or worker, it does not answer, no other worker of its model is combined,
            or it shares its device.
    """
    state = running_cluster(cluster)
    workers = {one["id"]: one for one in read_cluster(state)["workers"]}
    if name not in workers:
        raise CPDError(f"no worker {name!r} runs in cluster '{cluster}'; there are: {', '.join(workers) or 'none'}")
    models = {one["id"]: one.get("model", "") for one in workers.values()}  # an older router does not say it
    others = [one for one in workers.values() if one["id"] != name and models[one["id"]] == models[name]]
    of = f" for {models[name]}" if len(set(models.values())) > 1 else ""
    if role == "prefill" and not any(one["role"] == "combined" and one["state"] == "ready" for one in others):
        raise CPDError(f"{name} is the last combined worker that is ready{of}: somebody must answer requests")
    set_role(name, workers[name]["address"], state.admin_key, role)
    sys.stdout.write(f"{name} is a {role} worker now.\n")


def set_role(name: str, address: str, admin_key: str, role: Role) -> None:
    """Tells a worker its role.

    Raises:
        CPDError: It does not answer, is too old, or shares its device.
    """
    try:
        with admin_channel(address, _TIMEOUT_S) as channel:
            rpc.AdminStub(channel).SetRole(
                pb.SetRoleRequest(role=_ROLES[role]), metadata=admin_metadata(admin_key), timeout=_TIMEOUT_S
            )
    except (grpc.RpcError, OSError) as error:
        if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise CPDError(f"worker {name} is of an older version, which can't change its role") from None
        if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise CPDError(f"worker {name} refuses: {error.details()}") from None
        reason = error.details() if isinstance(error, grpc.RpcError) else error
        raise CPDError(f"worker {name} at {without_fingerprint(address)} does not answer: {reason}") from None

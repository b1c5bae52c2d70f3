"""`cpd role`: changes the role of a worker of a running cluster, while it runs."""

import sys

from cpd.common.errors import CPDError
from cpd.common.settings import Role
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster
from worker.admin_calls import set_role


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

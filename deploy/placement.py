"""The resources that each process requests from Ray.

A role runs only on nodes that declare its custom resource (`ray start --resources '{"cpd_prefill": 2}'`). If no node
does, a worker takes one CPU and a router almost nothing. A local Ray declares more than any cluster needs.

A Ray that starts nodes by itself says so: its head declares `cpd_grows`. Then all processes are placed by role, also if
no node with places for a role runs yet.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from cpd.common.errors import ConfigError
from deploy.processes import Kind, ProcessSpec

LOCAL_PLACES = 1000.0
GROWS = "cpd_grows"
"""Custom resource of a Ray that starts nodes by itself."""
_ROUTER_CPU = 0.01


def role_resource(kind: Kind) -> str:
    """Returns the name of the custom resource of which such a process takes one unit."""
    return f"cpd_{kind}"


def local_resources() -> dict[str, float]:
    """Returns the custom resources that a local Ray declares: room for any number of processes of each role.

    What a machine can really hold, its memory and GPUs say. Ray can't declare more resources later.
    """
    return {role_resource(kind): LOCAL_PLACES for kind in get_args(Kind)}


def grows(cluster_resources: Mapping[str, float]) -> bool:
    """True if Ray starts nodes by itself when there is no place for a process."""
    return cluster_resources.get(GROWS, 0) > 0


def gpu_share(device: str, workers: int, gpus: float, *, growing: bool = False) -> float:
    """Returns the share of a GPU that each worker takes; 0 without GPUs. A Ray that grows gets one for each worker.

    Raises:
        ConfigError: `device` asks for a GPU, and Ray has none.
    """
    if device == "cpu" or (device == "auto" and gpus < 1):
        return 0.0
    if growing:
        return 1.0
    if gpus < 1:
        raise ConfigError(
            "--device cuda: Ray finds no GPU (check with `nvidia-smi`); --device cpu computes without one"
        )
    return 1 / sharing(workers, int(gpus))


def sharing(workers: int, gpus: int) -> int:
    """Returns how many workers share a GPU when they are spread evenly."""
    return -(-workers // gpus)


def check_places(specs: Sequence[ProcessSpec], cluster_resources: Mapping[str, float]) -> None:
    """Checks that no more processes are wanted than there are, or will be, places of their role.

    Raises:
        ConfigError: The cluster declares a role's resource, but too little of it.
    """
    if grows(cluster_resources):
        return
    for kind, count in Counter(spec.kind for spec in specs).items():
        name = role_resource(kind)
        if 0 < cluster_resources.get(name, 0) < count:
            raise ConfigError(
                f"the Ray cluster has {cluster_resources[name]:g} of the resource {name}, and {count:g} are needed:"
                " start fewer processes or declare more"
            )


def demand_of(spec: ProcessSpec, cluster_resources: Mapping[str, float], gpus_per_worker: float) -> dict[str, float]:
    """Returns the resources of a process."""
    role = role_resource(spec.kind)
    if cluster_resources.get(role) or grows(cluster_resources):
        demand = {role: 1.0}
    else:
        demand = {"CPU": 1.0 if spec.is_worker else _ROUTER_CPU}
    if spec.is_worker and gpus_per_worker:
        demand["GPU"] = gpus_per_worker
    return demand

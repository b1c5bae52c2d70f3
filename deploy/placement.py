"""The resources that each process requests from Ray.

A role runs only on nodes that declare its custom resource (`ray start --resources '{"cpd_prefill": 2}'`). If no node
does, a worker takes one CPU; a router, and a worker on a shared device, almost nothing. A local Ray declares more than
any cluster needs.

A Ray that starts nodes by itself says so: its head declares `cpd_grows`. Then all processes are placed by role, also if
no node with places for a role runs yet.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from cpd.common.errors import ConfigError
from deploy.processes import Kind, ProcessSpec

LOCAL_PLACES = 1000.0
GROWS = "cpd_grows"
"""Custom resource of a Ray that starts nodes by itself."""
_ALMOST_NO_CPU = 0.01


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


def demand_of(
    spec: ProcessSpec, cluster_resources: Mapping[str, float], gpus_per_worker: float, *, shared_device: bool = False
) -> dict[str, float]:
    """Returns the resources of a process.

    Args:
        shared_device: The workers of a machine share all of its cores; which of them are awake is up to the ledger.
    """
    role = role_resource(spec.kind)
    if cluster_resources.get(role) or grows(cluster_resources):
        demand = {role: 1.0}
    else:
        demand = {"CPU": 1.0 if spec.is_worker and not shared_device else _ALMOST_NO_CPU}
    if spec.is_worker and gpus_per_worker:
        demand["GPU"] = gpus_per_worker
    return demand


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a process is.

    Attributes:
        node: Ray's id of its machine.
        displaced: Ray had to start it there, because its machine was lost.
    """

    spec: ProcessSpec
    node: str
    displaced: bool


def next_move(
    placed: Sequence[Placed], nodes: Collection[str], refused: Container[tuple[Kind, str]]
) -> tuple[ProcessSpec, str] | None:
    """Returns a displaced process that another machine should take, and that machine's node; None if there is none.

    Machines should have equal numbers of workers, and of routers; a difference of one is equal.

    Args:
        nodes: Nodes that may get a process.
        refused: Nodes that can't take a process of a kind.
    """
    for one in placed:
        if not one.displaced:
            continue
        counts = Counter(other.node for other in placed if other.spec.is_worker == one.spec.is_worker)
        free = [node for node in nodes if (one.spec.kind, node) not in refused]
        emptiest = min(free, key=lambda node: counts[node], default=one.node)
        if counts[one.node] - counts[emptiest] > 1:
            return one.spec, emptiest
    return None

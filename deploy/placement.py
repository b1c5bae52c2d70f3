"""What each process asks of Ray.

A role is pinned to nodes that declare its custom resource (`ray start --resources '{"cpd_prefill": 2}'`); where no
node does, a worker takes one CPU and a router next to nothing. A local Ray declares just what the cluster needs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from cpd.common.errors import ConfigError
from deploy.processes import Kind, ProcessSpec

_ROUTER_CPU = 0.01


def role_resource(kind: Kind) -> str:
    """Name of the custom resource that a process of this kind takes one unit of."""
    return f"cpd_{kind}"


def local_resources(specs: Sequence[ProcessSpec]) -> dict[str, float]:
    """The custom resources that a local Ray declares."""
    return {role_resource(kind): float(count) for kind, count in Counter(spec.kind for spec in specs).items()}


def gpu_share(device: str, workers: int, gpus: float) -> float:
    """How much of a GPU each worker takes: one, or an equal part where there are fewer GPUs than workers.

    Raises:
        ConfigError: `device` asks for a GPU, and Ray knows of none.
    """
    if device == "cpu" or (device == "auto" and gpus < 1):
        return 0.0
    if gpus < 1:
        raise ConfigError("--device cuda: Ray finds no GPU, as `nvidia-smi` would; use --device cpu to go without")
    return 1 / sharing(workers, int(gpus))


def sharing(workers: int, gpus: int) -> int:
    """How many workers share a GPU: they are spread evenly."""
    return -(-workers // gpus)


def bundles(
    specs: Sequence[ProcessSpec], cluster_resources: Mapping[str, float], gpus_per_worker: float
) -> list[dict[str, float]]:
    """Resources of each process, as the placement group's bundles.

    Raises:
        ConfigError: The cluster declares a role's resource, but not enough of it.
    """
    wanted = local_resources(specs)
    for name, count in wanted.items():
        if 0 < cluster_resources.get(name, 0) < count:
            raise ConfigError(
                f"the Ray cluster has {cluster_resources[name]:g} of the resource {name}, and {count:g} are needed:"
                " start fewer processes or declare more"
            )
    result = []
    for spec in specs:
        role = role_resource(spec.kind)
        demand = {role: 1.0} if cluster_resources.get(role) else {"CPU": 1.0 if spec.is_worker else _ROUTER_CPU}
        if spec.is_worker and gpus_per_worker:
            demand["GPU"] = gpus_per_worker
        result.append(demand)
    return result

"""The Ray actor that keeps one process of the cluster running on the node where Ray placed it.

The process is a plain `python -m decode_worker …` outside Ray. If the actor dies, the process ends with it, and Ray
restarts the actor, on another node if necessary.
"""

from collections.abc import Sequence

import ray
from ray.util import placement_group_table

from deploy.cores import split_cores, usable_cores
from deploy.endpoint import WILDCARDS
from deploy.listener import SharedListener
from deploy.model import resolve_model
from deploy.process import ProcessState, Supervised
from deploy.processes import ProcessSpec


class Supervisor:
    """Starts and supervises `specs[index]`.

    Args:
        specs: The processes of the cluster, in the order of the placement group's bundles.
        cores_apart: Give the workers of a node disjoint cores.
    """

    def __init__(self, specs: Sequence[ProcessSpec], index: int, cores_apart: bool) -> None:
        spec = specs[index]
        flags = {}
        if spec.flags.get("host") in WILDCARDS:
            flags["advertise_host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._process = Supervised(
            spec.name,
            lambda: spec.command(str(resolve_model(spec.model)), **flags),
            {**spec.environment(), **_gpus()},
            _cores(specs, index) if cores_apart and spec.is_worker else frozenset(),
            None if spec.is_worker else SharedListener(*spec.listens_on),
        )

    def state(self, from_line: int) -> ProcessState:
        """See `Supervised.state`."""
        return self._process.state(from_line)

    def stop(self) -> None:
        """Ends the process; returns when it is gone."""
        self._process.stop()


def _gpus() -> dict[str, str]:
    """Returns the variable that shows the process only the GPUs that Ray gave this actor.

    Ray does not set it if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as on some shared clusters; then all
    workers of a machine would use its first GPU.
    """
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}


def _cores(specs: Sequence[ProcessSpec], index: int) -> frozenset[int]:
    """Returns the cores of worker `index`, disjoint from those of the other workers on its node."""
    node_of: dict[int, str] = placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]
    here = [other for other, spec in enumerate(specs) if spec.is_worker and node_of[other] == node_of[index]]
    return split_cores(usable_cores(), len(here))[here.index(index)]

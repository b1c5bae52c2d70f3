"""The Ray actor that keeps one process of the cluster running on the node where Ray placed it.

The process is a plain `python -m decode_worker …` outside Ray. If the actor dies, the process ends with it, and Ray
restarts the actor, on another node if necessary.
"""

from dataclasses import dataclass

from deploy.cores import split_cores, usable_cores
from deploy.endpoint import WILDCARDS
from deploy.model import resolve_model
from deploy.process import ProcessState, Supervised
from deploy.processes import ProcessSpec


@dataclass(frozen=True, slots=True)
class CoreShare:
    """A worker's part of its machine's cores: part `index` of `parts` equal ones."""

    index: int
    parts: int

    def cores(self) -> frozenset[int]:
        """Returns the cores on this machine."""
        return split_cores(usable_cores(), self.parts)[self.index]


class Supervisor:
    """Starts and supervises one process.

    Args:
        cores: The cores that it may use; None: all.
    """

    def __init__(self, spec: ProcessSpec, cores: CoreShare | None) -> None:
        import ray

        flags = {}
        if spec.flags.get("host") in WILDCARDS:
            flags["advertise_host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._process = Supervised(
            spec.name,
            lambda: spec.command(str(resolve_model(spec.model)), **flags),
            {**spec.environment(), **_gpus()},
            cores.cores() if cores else frozenset(),
        )

    def state(self, from_line: int, cores: CoreShare | None) -> ProcessState:
        """Moves the process to other cores if they have changed, and reports. See `Supervised.state`."""
        if cores:
            self._process.use_cores(cores.cores())
        return self._process.state(from_line)

    def drain(self) -> None:
        """Lets the process end its requests; returns when it is gone."""
        self._process.drain()

    def stop(self) -> None:
        """Ends the process; returns when it is gone."""
        self._process.stop()


def _gpus() -> dict[str, str]:
    """Returns the variable that shows the process only the GPUs that Ray gave this actor.

    Ray does not set it if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as on some shared clusters; then all
    workers of a machine would use its first GPU.
    """
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}

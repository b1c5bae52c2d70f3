"""The Ray actor that keeps one process of the cluster running on the node where Ray placed it.

The process is a plain `python -m decode_worker …` outside Ray. If the actor dies, the process ends with it, and Ray
restarts the actor, on another node if necessary.

After an upgrade, `cpd restart` makes a launcher start supervisors that are newer than itself. So the two exchange plain
values: a newer supervisor has defaults for fields that it does not get, and may send more than the launcher reads.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from cpd.common.errors import ConfigError
from deploy.cores import split_cores, usable_cores
from deploy.endpoint import WILDCARDS
from deploy.listener import SharedListener
from deploy.model import resolve_model
from deploy.process import Supervised
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
        spec: The fields of a `ProcessSpec`.
        cores: The fields of the `CoreShare` that it may use; None: all cores.
    """

    def __init__(self, spec: Mapping[str, Any], cores: Mapping[str, int] | None) -> None:
        import ray

        process = ProcessSpec(**spec)
        flags = {}
        if process.flags.get("host") in WILDCARDS:
            flags["advertise_host"] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        environment, refusal = {}, None
        try:
            environment = {**process.environment(), **_gpus()}
        except ConfigError as error:
            refusal = error

        def command() -> list[str]:
            if refusal is not None:
                raise refusal
            return process.command(_resolved(process.model), **flags, **_models(process))

        self._process = Supervised(
            process.name,
            command,
            environment,
            CoreShare(**cores).cores() if cores else frozenset(),
            None if process.is_worker else SharedListener(*process.listens_on),
        )

    def state(self, from_line: int, cores: Mapping[str, int] | None) -> dict[str, Any]:
        """Moves the process to other cores if they have changed.

        Returns:
            The fields of `Supervised.state`, and `node`, Ray's id of the node.
        """
        import ray

        if cores:
            self._process.use_cores(CoreShare(**cores).cores())
        return {**asdict(self._process.state(from_line)), "node": ray.get_runtime_context().get_node_id()}

    def drain(self) -> None:
        """Lets the process end its requests; returns when it is gone."""
        self._process.drain()

    def stop(self) -> None:
        """Ends the process; returns when it is gone."""
        self._process.stop()


def _resolved(model: str) -> str:
    return str(resolve_model(model)) if model else ""


def _models(process: ProcessSpec) -> dict[str, str]:
    """Returns the flag of the router of several models, with their directories on this machine."""
    if "models" not in process.flags:
        return {}
    served = [{**one, "model": _resolved(one["model"])} for one in orjson.loads(process.flags["models"])]
    return {"models": orjson.dumps(served).decode()}


def _gpus() -> dict[str, str]:
    """Returns the variable that shows the process only the GPUs that Ray gave this actor.

    Ray does not set it if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as on some shared clusters; then all
    workers of a machine would use its first GPU.
    """
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}

"""The processes of a cluster under Ray: one placement group, and a supervising actor for each process."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpd.common.errors import ConfigError
from deploy.process import ProcessState
from deploy.processes import ProcessSpec
from deploy.session import dead_process

PLACEMENT_S = 60.0
STOP_S = 6.0


class Cluster:
    """The supervised processes, in the order of `specs`."""

    def __init__(self, specs: Sequence[ProcessSpec], actors: Sequence[Any]) -> None:
        self.specs = specs
        self._actors = actors
        self._next_line = [0] * len(specs)

    def states(self) -> list[ProcessState | None]:
        """Returns each supervisor's report with the log lines since the last call; None while Ray (re)starts it."""
        import ray

        asked = [actor.state.remote(line) for actor, line in zip(self._actors, self._next_line, strict=True)]
        ray.wait(asked, num_returns=len(asked), timeout=1.0)
        states: list[ProcessState | None] = []
        for index, answer in enumerate(asked):
            state: ProcessState | None = None
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                state = ray.get(answer, timeout=0)
            if state:
                # A new supervisor counts its lines from 0.
                self._next_line[index] = state.next_line
            states.append(state)
        return states

    def stop(self) -> None:
        """Ends all processes."""
        import ray

        ray.wait([actor.stop.remote() for actor in self._actors], num_returns=len(self._actors), timeout=STOP_S)


@contextlib.contextmanager
def launched(
    specs: Sequence[ProcessSpec], demands: Sequence[Mapping[str, float]], cores_apart: bool
) -> Iterator[Cluster]:
    """Places and starts the processes; the end of the context ends them.

    Args:
        demands: Resources of each process.
        cores_apart: Give the workers of a node disjoint cores.

    Raises:
        ConfigError: Ray has no room for them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from deploy.supervisor import Supervisor

    # GPU workers exchange pages faster within a machine; CPU workers would compete for its cores.
    strategy = "PACK" if any("GPU" in demand for demand in demands) else "SPREAD"
    group = placement_group([dict(demand) for demand in demands], strategy=strategy)
    try:
        if not group.wait(PLACEMENT_S):
            demand = Counter[str]()
            for one in demands:
                demand.update(one)
            raise ConfigError(
                f"the Ray cluster has no room for {', '.join(spec.name for spec in specs)}, which need "
                + ", ".join(f"{amount:g} {name}" for name, amount in demand.items())
            )
        actor_class = ray.remote(Supervisor)
        actors = [
            actor_class.options(
                name=spec.name,
                num_cpus=demand.get("CPU", 0),
                num_gpus=demand.get("GPU", 0),
                resources={name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(specs, index, cores_apart)
            for index, (spec, demand) in enumerate(zip(specs, demands, strict=True))
        ]
        cluster = Cluster(specs, actors)
        try:
            yield cluster
        finally:
            cluster.stop()
            if not dead_process():
                for actor in actors:
                    ray.kill(actor)  # type: ignore[arg-type]
    finally:
        if not dead_process():
            remove_placement_group(group)

"""The processes of a cluster under Ray: each has a placement group and a supervising actor of its own.

    placed ──▶ started ──▶ stopped (the group is kept for a restart, or removed)

Ray restarts an actor that dies, and with it the process. So the launcher ends the actor of a process that has ended for
good (drained on request, or replaced by a newer one), and of one that it stops itself.

When a machine is lost, Ray places its groups on others, or, without room, on the next machine that joins:

    on its machine ──▶ silent ──▶ lost: Ray looks for room ──▶ displaced: on another machine

`deploy/evening.py` brings displaced processes to machines that have joined since.

Processes come and go while the cluster runs. The launcher's main thread reads their states; another thread may start
and stop some meanwhile.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cpd.common.errors import ConfigError, CPDError
from deploy.placement import Placed
from deploy.process import ProcessState
from deploy.processes import ProcessSpec
from deploy.session import dead_process
from deploy.supervisor import CoreShare, Supervisor

PLACEMENT_S = 60.0
"""Longest wait for room in Ray."""
GROWTH_S = 900.0
"""Longest wait for room in a Ray that starts nodes by itself: a machine that boots and installs takes minutes."""
STOP_S = 6.0
SILENT_S = 5.0
"""A supervisor that gives no report for this long is silent."""
_AT_ONCE_S = 2.0

Tell = Callable[[str], None]
"""Shows a sentence to the user."""


@dataclass(slots=True)
class _Process:
    spec: ProcessSpec
    group: Any
    node: str
    actor: Any = None
    answer: Any = None  # to the last question for a report, if it has not come yet
    answered_at: float = 0.0
    lost_at: float = 0.0  # 0: it is not
    state: ProcessState | None = None
    next_line: int = 0
    displaced: bool = False
    cores: CoreShare | None = None


class Cluster:
    """The supervised processes.

    Args:
        demand: Returns the resources that a process requests from Ray.
        cores_apart: Give the workers of a node disjoint cores.
        room_s: Longest wait for room in Ray.
    """

    def __init__(
        self, demand: Callable[[ProcessSpec], Mapping[str, float]], cores_apart: bool, room_s: float = PLACEMENT_S
    ) -> None:
        self._demand = demand
        self._room_s = room_s
        self._cores_apart = cores_apart
        self._lock = threading.Lock()  # guards everything below
        self._processes: dict[str, _Process] = {}
        self._last_lines: list[tuple[str, list[str]]] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once its processes are being ended."""
        return self._closed

    @property
    def specs(self) -> list[ProcessSpec]:
        """All processes, in the order of their start."""
        with self._lock:
            return [process.spec for process in self._processes.values()]

    def state(self, name: str) -> ProcessState | None:
        """Returns the report that the last `states` got of a process."""
        with self._lock:
            return self._processes[name].state if name in self._processes else None

    def states(self) -> dict[str, ProcessState | None]:
        """Returns each supervisor's report with the log lines since the last call; None while Ray (re)starts it.

        The report that a process has ended for good is its supervisor's last one.
        """
        import ray

        with self._lock:
            asked = [(process, process.actor) for process in self._processes.values() if process.actor]
            for process, actor in asked:
                if process.answer is None:
                    process.answer = actor.state.remote(process.next_line, _fields(process.cores))
            answers = [process.answer for process, _ in asked]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=1.0)
        states: dict[str, ProcessState | None] = {}
        for (process, actor), answer in zip(asked, answers, strict=True):
            state, ended, node, waits = None, False, "", False
            try:
                sent = ray.get(answer, timeout=0)
                state, node = _report(sent), sent["node"]
            except ray.exceptions.GetTimeoutError:
                waits = True
            except ray.exceptions.RayActorError:
                pass
            with self._lock:
                if process.actor is not actor:  # stopped meanwhile
                    continue
                if not waits:
                    process.answer = None
                if state:
                    # A new supervisor counts its lines from 0.
                    process.next_line = state.next_line
                    if process.node != node:
                        process.node, process.displaced = node, True
                        self._share_cores()
                    process.state, process.answered_at, process.lost_at = state, time.monotonic(), 0.0
                    if ended := state.has_ended_for_good and not dead_process():  # a dead GCS restarts no actor
                        process.actor = process.answer = None
                states[process.spec.name] = state
            if ended:
                ray.kill(actor)
        return states

    def lost(self) -> dict[str, str]:
        """Returns what is known about the processes whose supervisors are silent, by name."""
        now = time.monotonic()
        with self._lock:
            silent = [
                (process, process.state.host)
                for process in self._processes.values()
                if process.actor and process.state and now - process.answered_at > SILENT_S
            ]
        if not silent or dead_process():
            return {}
        hosts = self.hosts()
        found = {}
        for process, host in silent:
            node = _node(process.group)
            if process.node not in hosts:
                process.lost_at = process.lost_at or now
            if process.node not in hosts and node in hosts:
                reason = f"{host} was lost; it starts on {hosts[node]}"
            elif not process.lost_at or now - process.lost_at < SILENT_S:  # Ray may still find room
                reason = f"its supervisor on {host} does not answer"
            else:
                needs = ", ".join(f"{amount:g} {name}" for name, amount in self._demand(process.spec).items())
                reason = f"{host} is lost, and no other machine has room ({needs})"
            found[process.spec.name] = reason
        return found

    def machine_is_lost(self, name: str) -> bool:
        """True if the machine of a process is lost, and the process does not run elsewhere yet."""
        if dead_process():
            return False
        hosts = self.hosts()
        with self._lock:
            process = self._processes[name]
            return process.actor is not None and process.node not in hosts

    def hosts(self) -> dict[str, str]:
        """Returns the name of each live machine, by Ray's id of its node."""
        import ray

        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return {node["NodeID"]: node["NodeManagerHostname"] for node in nodes if node["Alive"]}

    def placed(self) -> list[Placed]:
        """Returns where the processes are."""
        with self._lock:
            return [
                Placed(process.spec, process.node, process.displaced)
                for process in self._processes.values()
                if process.actor
            ]

    def resources(self) -> dict[str, float]:
        """Returns the total resources of all live machines."""
        import ray

        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return total

    def last_lines(self) -> list[tuple[str, list[str]]]:
        """Returns the last log lines of processes that were stopped or restarted since the last call, by name."""
        with self._lock:
            lines, self._last_lines = self._last_lines, []
        return lines

    def start(
        self, specs: Sequence[ProcessSpec], tell: Tell, within_s: float | None = None, node: str | None = None
    ) -> None:
        """Places and starts processes.

        Args:
            tell: Is told at once if there is no room yet.
            within_s: Longest wait for room; None: as long as this cluster waits.
            node: The only node that they may start on.

        Raises:
            ConfigError: Ray has no room for them.
        """
        groups: list[Any] = []
        try:
            within_s = self._room_s if within_s is None else within_s
            placed = self._place(specs, groups, tell, within_s, node)
        except BaseException:
            _remove(groups)
            raise
        with self._lock:
            if self._closed:
                _remove(groups)
                raise CPDError("the cluster is stopping")
            self._processes.update({process.spec.name: process for process in placed})
            self._share_cores()
            for process in placed:
                process.actor = self._actor(process)

    def restart(self, name: str, spec: ProcessSpec) -> None:
        """Drains a process, waits until it is gone, and starts `spec`, of the same name, in its place."""
        lost = self.machine_is_lost(name)
        process = self._end(name)
        with self._lock:
            if self._closed:
                raise CPDError("the cluster is stopping")
            process.spec, process.next_line = spec, 0
            if not lost:  # else it stays known as lost until it runs
                process.state = None
            process.actor = self._actor(process)

    def stop(self, name: str) -> None:
        """Drains a process, waits until it is gone, and gives its resources back."""
        process = self._end(name)
        with self._lock:
            self._processes.pop(name, None)
            self._share_cores()
        _remove([process.group])

    def close(self) -> None:
        """Ends all processes."""
        import ray

        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
        actors = [process.actor for process in processes if process.actor]
        if actors:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_S)
        if not dead_process():
            for actor in actors:
                ray.kill(actor)
        _remove([process.group for process in processes])

    def _place(
        self, specs: Sequence[ProcessSpec], groups: list[Any], tell: Tell, within_s: float, only: str | None
    ) -> list[_Process]:
        import ray
        from ray.util.placement_group import placement_group

        demands = [dict(self._demand(spec)) for spec in specs]
        deadline = time.monotonic() + within_s
        told = False

        def node_of(index: int) -> str:
            """Returns the node of a group, once there is room for it."""
            nonlocal told
            while not groups[index].wait(min(_AT_ONCE_S, max(0.0, deadline - time.monotonic()))):
                wanted = Counter[str]()
                for one in demands[index:]:
                    wanted.update(one)
                free = ray.available_resources()  # type: ignore[no-untyped-call]
                room = (
                    f"no room for {', '.join(one.name for one in specs[index:])}, which need "
                    + ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
                    + "; free are "
                    + ", ".join(f"{free.get(name, 0):g} {name}" for name in wanted)
                )
                if time.monotonic() >= deadline:
                    raise ConfigError(f"the Ray cluster has {room}")
                if not told:
                    told = True
                    tell(f"The Ray cluster has {room}. Waiting {within_s:.0f} s for it")
            return _node(groups[index])

        # All are requested before any is waited for, so that a Ray that grows starts all nodes at once. GPU workers
        # exchange pages faster within a machine: they ask for the first one's. CPU workers would compete for its cores.
        near = next((process.node for process in self._processes.values() if process.spec.is_worker), None)
        for index, demand in enumerate(demands):
            if only or "GPU" in demand:
                groups.append(placement_group([demand], strategy="STRICT_PACK", _soft_target_node_id=only or near))
                near = near or node_of(index)
            else:
                groups.append(placement_group([demand], strategy="SPREAD"))
        placed = [_Process(spec, groups[index], node_of(index)) for index, spec in enumerate(specs)]
        if elsewhere := [process.spec.name for process in placed if only and process.node != only]:
            raise ConfigError(f"there is no room for {', '.join(elsewhere)}")
        return placed

    def _actor(self, process: _Process) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        demand = self._demand(process.spec)
        return (
            ray.remote(Supervisor)
            .options(
                num_cpus=demand.get("CPU", 0),
                num_gpus=demand.get("GPU", 0),
                resources={name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,
                max_concurrency=4,  # it reports while it stops its process
                scheduling_strategy=PlacementGroupSchedulingStrategy(process.group, placement_group_bundle_index=0),
            )
            .remote(asdict(process.spec), _fields(process.cores))
        )

    def _end(self, name: str) -> _Process:
        """Drains a process, and ends its supervisor."""
        import ray

        with self._lock:
            process = self._processes[name]
            actor = process.actor
        if actor is None:  # ended already, and not started again since
            return process
        drained = actor.drain.remote()
        while not ray.wait([drained], timeout=1.0)[0]:
            if dead := dead_process():
                raise CPDError(f"Ray's {dead} died")
            if process.node not in self.hosts():  # nothing runs there any more
                break
        with self._lock:
            process.actor = process.answer = None
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(drained, timeout=0)  # raises if the actor died: then Ray must not start it again
            last = _report(ray.get(actor.state.remote(process.next_line, None), timeout=STOP_S))
            with self._lock:
                self._last_lines.append((name, last.lines))
        ray.kill(actor)
        return process

    def _share_cores(self) -> None:
        """Gives each worker its part of its node's cores; its supervisor is told with the next `states`."""
        if not self._cores_apart:
            return
        workers: dict[str, list[_Process]] = {}
        for process in self._processes.values():
            if process.spec.is_worker:
                workers.setdefault(process.node, []).append(process)
        for here in workers.values():
            for index, process in enumerate(here):
                process.cores = CoreShare(index, len(here))


@contextlib.contextmanager
def launched(
    specs: Sequence[ProcessSpec],
    demand: Callable[[ProcessSpec], Mapping[str, float]],
    cores_apart: bool,
    tell: Tell,
    room_s: float = PLACEMENT_S,
) -> Iterator[Cluster]:
    """Places and starts the processes; the end of the context ends all that run then.

    Raises:
        ConfigError: Ray has no room for them.
    """
    cluster = Cluster(demand, cores_apart, room_s)
    try:
        cluster.start(specs, tell)
        yield cluster
    finally:
        cluster.close()


def _fields(cores: CoreShare | None) -> dict[str, int] | None:
    return asdict(cores) if cores else None


def _report(sent: Mapping[str, Any]) -> ProcessState:
    """Returns a supervisor's report; a newer supervisor may have sent more fields."""
    return ProcessState(**{field.name: sent[field.name] for field in fields(ProcessState)})


def _node(group: Any) -> str:
    """Returns the node that Ray has reserved for a group; empty while it looks for one."""
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes.get(0, "")


def _remove(groups: Sequence[Any]) -> None:
    from ray.util.placement_group import remove_placement_group

    if not dead_process():
        for group in groups:
            remove_placement_group(group)

"""Changes to a running cluster: `cpd scale` and `cpd restart`, as the launcher carries them out.

A process that goes gets SIGTERM and ends its requests first. New processes are ready, and known to all routers, before
old ones go. What a change has started is ended again if it fails.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cpd.common.errors import CheckpointError, ConfigError, CPDError
from cpd.common.membership import Member
from cpd.common.process import EXIT_DRAINED
from cpd.common.scaling import ModelNumbers
from cpd.common.served_models import ServedModel
from cpd.common.settings import ClusterSettings
from deploy.cluster import Cluster, Tell
from deploy.cluster_status import has_workers
from deploy.model import check_models
from deploy.placement import check_places
from deploy.process import ProcessState
from deploy.processes import Kind, ProcessSpec, name_of, process, processes
from deploy.state import ClusterState

STARTS = 3
"""A process that has died this often before it was ready does not start."""
SUPERVISOR_S = 60.0
"""Time limit for Ray to start an actor."""
_POLL_S = 0.25
_ROOM_S = 5.0
_SEEN_S = 60.0
_WORKERS: tuple[Kind, ...] = ("combined", "prefill")
_KINDS: tuple[Kind, ...] = (*_WORKERS, "router")
_ORDER: tuple[Kind, ...] = ("simulated", *_KINDS)
_COUNTS = ("combined", "prefill", "routers")
FIXED = {
    *("model", "models", "dtype", "quantization", "kv_dtype", "device", "max_model_len", "transport", "simulate"),
    "served_model_name",
    *("cluster", "host", "port", "redis_url", "ray_address", "secret_file", "detach"),
    *("tls_cert", "tls_key", "log_format", "planner", "min_workers", "max_workers", "device_memory"),
}
"""Settings on which all processes must agree, or that belong to the launcher."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the processes of a cluster are started.

    Attributes:
        given: The settings as they were given by flags, environment and config file.
        settings: All values, with what the launcher has filled in.
        worker_host: Interface that workers listen on.
        gpus_per_worker: Share of a GPU that each worker takes.
        mark: See `ProcessSpec.mark`.
    """

    given: ClusterSettings
    settings: ClusterSettings
    worker_host: str
    gpus_per_worker: float
    mark: str

    def marked(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns the process with the mark of this cluster."""
        return replace(spec, mark=self.mark)

    def process(self, kind: Kind, index: int, serves: str = "") -> ProcessSpec:
        """Returns a worker or router, or the process of all simulated workers. `serves`: see `ProcessSpec`."""
        if kind == "simulated":
            return self.marked(processes(self.settings, self.worker_host)[0])
        return self.marked(process(self.settings, self.worker_host, kind, index, serves))


def start_error(spec: ProcessSpec, state: ProcessState | None) -> str:
    """Returns why a process does not start; empty: it may yet."""
    if state and state.error:
        return f"{spec.name} on {state.host}: {state.error}"
    if state and state.pid is None and state.starts >= STARTS:
        return (
            f"{spec.name} has died {state.starts} times while starting, last with exit code {state.exit_code};"
            " `cpd logs` shows why"
        )
    return ""


def no_supervisor(spec: ProcessSpec) -> str:
    """Returns what to say about a process of which Ray has started no supervisor."""
    return f"Ray has not started the supervisor of {spec.name} within {SUPERVISOR_S:.0f} s"


class Changes:
    """Makes the changes, one at a time; the launcher's main thread calls `Cluster.states` meanwhile.

    Args:
        leases: Reads the leases of all members.
        prepare: Checks changed settings and fills in their paths.

    Attributes:
        state: Where the routers answer; the launcher replaces it when another machine has them.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        state: ClusterState,
        leases: Callable[[], list[Member]],
        prepare: Callable[[ClusterSettings], ClusterSettings],
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self.state = state
        self._leases = leases
        self._prepare = prepare

    def numbers(self) -> tuple[list[ModelNumbers], int]:
        """Returns how many workers of each model and how many routers there are, without those that were drained.

        No models: the number of workers can't change.
        """
        here = Counter((spec.serves, spec.kind) for spec in self._cluster.specs if not self._is_drained(spec))
        models = [one.name for one in self._plan.settings.models] or [""]
        counts: list[ModelNumbers] = [
            {"model": name, "combined": here[name, "combined"], "prefill": here[name, "prefill"]} for name in models
        ]
        return [] if here["", "simulated"] else counts, here["", "router"]

    def scale(self, arguments: Mapping[str, Any], tell: Tell) -> None:
        """Starts or ends processes until there are as many as wanted.

        Args:
            arguments: Numbers of `combined`, `prefill` and `router`; a role that is left out does not change. `model`:
                name of the model whose workers are meant, if there are several.

        Raises:
            CPDError: It is not said which model is meant, there is no room, or a new process does not start.
        """
        wanted: dict[Kind, int] = {kind: arguments[kind] for kind in _KINDS if arguments.get(kind) is not None}
        model = self._meant(arguments.get("model", ""), workers=bool(wanted.keys() - {"router"}))
        if any(spec.kind == "simulated" for spec in self._cluster.specs) and wanted.keys() - {"router"}:
            raise ConfigError(
                "all simulated workers run in one process: their number can't change while it runs; start the cluster"
                " again with other --combined and --prefill"
            )
        self._forget_drained()
        new: list[ProcessSpec] = []
        leaving: list[str] = []
        lost = self._cluster.lost()

        def runs(name: str) -> bool:
            """True if the process runs."""
            state = self._cluster.state(name)
            return state is not None and state.pid is not None and name not in lost

        for kind, count in wanted.items():
            serves = "" if kind == "router" else model
            here = self._indices(kind, serves)
            free = (index for index in range(len(here) + count) if index not in here)
            new += [self._plan.process(kind, next(free), serves) for _ in range(count - len(here))]
            by_number = [name_of(kind, index, serves) for index in reversed(here)]
            leaving += sorted(by_number, key=runs)[: max(0, len(here) - count)]
        self._start_and_end(new, leaving, tell)

    def resize(self, workers: int, ready: Sequence[str], tell: Tell) -> list[str]:
        """Starts or ends workers that began as combined ones until there are this many workers. One of them stays.

        Args:
            ready: The workers that are ready, those first that may end first. Some may have been started by hand.

        Returns:
            The names of the workers that have ended.

        Raises:
            CPDError: There is no room, or a new process does not start.
        """
        self._forget_drained()
        own = {spec.name for spec in self._cluster.specs if spec.is_worker}
        combined = [name_of("combined", index) for index in self._indices("combined")]
        others = len(self._indices("prefill")) + sum(name not in own for name in ready)
        wanted = max(1, workers - others)
        if wanted > len(combined):
            self.scale({"combined": wanted}, tell)
        place = {name: number for number, name in enumerate(ready)}
        leaving = sorted(combined, key=lambda name: place.get(name, -1))[: max(0, len(combined) - wanted)]
        if leaving:
            self._start_and_end([], leaving, tell)
        return leaving

    def _start_and_end(self, new: Sequence[ProcessSpec], leaving: Sequence[str], tell: Tell) -> None:
        if new:
            check_places([*self._cluster.specs, *new], self._cluster.resources())
            self._check_memory(new)
            tell(f"Starting {', '.join(spec.name for spec in new)}")
            self._add(new, tell)
        for name in leaving:
            self._remove(name, tell)
        simulated = any(spec.kind == "simulated" for spec in self._cluster.specs)
        shown: list[str] = []
        for serves in [one.name for one in self._plan.settings.models] or [""]:
            of = f" of {serves}" if serves else ""
            shown += [f"{len(self._indices(kind, serves))} {kind}{of}" for kind in _WORKERS if not simulated]
        shown.append(f"{len(self._indices('router'))} router")
        tell(f"The cluster has {', '.join(shown)}")

    def restart(self, arguments: Mapping[str, Any], tell: Tell) -> None:
        """Restarts processes one after the other, with the settings that the config file has now.

        Args:
            arguments: `names` of the processes; none: all.

        Raises:
            CPDError: A changed setting can't change while the cluster runs, or a process does not start with the
                settings; it then runs with the old ones again.
        """
        specs = {spec.name: spec for spec in self._cluster.specs}
        if unknown := sorted(set(arguments["names"]) - specs.keys()):
            raise ConfigError(
                f"`cpd up` has started no {', '.join(unknown)}; it has started {', '.join(sorted(specs))}"
            )
        self._forget_drained(keep=arguments["names"])
        specs = {spec.name: spec for spec in self._cluster.specs}
        before, self._plan = self._plan, self._changed(tell)
        chosen = [spec for name, spec in specs.items() if name in arguments["names"] or not arguments["names"]]
        restarted: list[str] = []
        try:
            for kind in _ORDER:
                of_kind = sorted((spec for spec in chosen if spec.kind == kind), key=_model_of)
                for serves, specs_of_model in groupby(of_kind, _model_of):
                    restarted += self._roll(kind, serves, list(specs_of_model), tell)
        except BaseException:
            self._plan = before
            raise
        tell(f"Restarted {', '.join(restarted) or 'none'}")

    def move(self, old: ProcessSpec, node: str, host: str, tell: Tell) -> None:
        """Starts a process on another machine, and ends an old one of its kind when it is ready.

        Args:
            node: Ray's id of the machine.
            host: Its name.

        Raises:
            CPDError: It has no room, or the new process does not start there. The old one goes on.
        """
        here = self._indices(old.kind, old.serves)
        free = next(index for index in range(len(here) + 1) if index not in here)
        spec = self._plan.process(old.kind, free, old.serves)
        tell(f"{host} has room: {spec.name} starts there in place of {old.name}")
        self._add([spec], tell, _ROOM_S, node)
        self._remove(old.name, tell)

    def _changed(self, tell: Tell) -> Plan:
        """Returns the plan with the settings of the config file as it is now."""
        old = self._plan.given
        fresh = old.reload()
        changed = {name for name in type(old).model_fields if getattr(fresh, name) != getattr(old, name)}
        counts = changed & set(_COUNTS)
        if "models" in changed and _without_numbers(fresh) == _without_numbers(old):
            counts.add("models")
        changed -= counts
        if fixed := sorted(changed & FIXED):
            names = ", ".join(name.replace("_", "-") for name in fixed)
            raise ConfigError(
                f"{names} can't change while the cluster runs: set it back, or stop the cluster and start it again"
            )
        if counts:
            named = ", ".join("combined and prefill of models" if name == "models" else name for name in sorted(counts))
            tell(f"{named} in the config file: not changed by a restart; use `cpd scale`")
        if not changed:
            return self._plan
        tell(f"Changed settings: {', '.join(sorted(name.replace('_', '-') for name in changed))}")
        update = {name: getattr(fresh, name) for name in changed}
        if "gpu_memory" in update:
            update["gpu_memory"] *= self._plan.gpus_per_worker or 1
        settings = self._prepare(self._plan.settings.model_copy(update=update))
        check_models(self._each_model(settings), running=True)
        return replace(self._plan, given=fresh, settings=settings)

    def _roll(self, kind: Kind, serves: str, specs: Sequence[ProcessSpec], tell: Tell) -> list[str]:
        """Restarts processes of one role and model, with an additional one meanwhile if there is room.

        Returns:
            The names of those that run again: all but those whose machine is lost.
        """
        surge, restarted = None, list[str]()
        if kind == "simulated":
            tell("The simulated workers run in one process: requests wait while it restarts")
        elif kind != "router" and self._plan.settings.device_memory is not None:
            tell("On a shared device no additional worker stands in: requests wait or go elsewhere meanwhile")
        else:
            surge = self._surge(kind, serves, tell)
        try:
            for old in specs:
                new = self._plan.process(kind, 0 if kind == "simulated" else _index(old), serves)
                if self._cluster.machine_is_lost(old.name):
                    self._cluster.restart(old.name, new)
                    tell(f"{old.name} has lost its machine: it gets the settings when Ray has room for it")
                    continue
                changed = not new.starts_like(old)
                tell(f"{old.name} ends its requests")
                self._cluster.restart(old.name, new)
                try:
                    self._wait([new])
                except CPDError:
                    if changed:
                        tell(f"{old.name} does not start with the changed settings; it gets the old ones again")
                        self._cluster.restart(old.name, old)
                    raise
                tell(f"{old.name} is ready again")
                restarted.append(old.name)
        finally:
            if surge:
                self._remove(surge, tell)
        return restarted

    def _surge(self, kind: Kind, serves: str, tell: Tell) -> str | None:
        """Starts one more process of a role and model; returns its name, or None if there is no room."""
        here = self._indices(kind, serves)
        spec = self._plan.process(kind, next(index for index in range(len(here) + 1) if index not in here), serves)
        try:
            check_places([*self._cluster.specs, spec], self._cluster.resources())
            self._check_memory([spec])
            self._add([spec], lambda _: None, _ROOM_S)
        except (ConfigError, CheckpointError) as error:
            tell(f"No room for one more {kind} meanwhile: {error}")
            return None
        tell(f"{spec.name} is ready to stand in")
        return spec.name

    def _add(
        self, specs: Sequence[ProcessSpec], tell: Tell, room_s: float | None = None, node: str | None = None
    ) -> None:
        self._cluster.start(specs, tell, room_s, node)
        try:
            self._wait(specs)
        except BaseException:
            for spec in specs:
                with contextlib.suppress(CPDError):
                    self._cluster.stop(spec.name)
            raise

    def _remove(self, name: str, tell: Tell) -> None:
        tell(f"{name} ends its requests")
        self._cluster.stop(name)
        tell(f"{name} has ended")

    def _wait(self, specs: Collection[ProcessSpec]) -> None:
        """Waits until the processes are ready and all routers use all workers.

        Raises:
            CPDError: One of them does not start, or the cluster is stopping.
        """
        started: float | None = None
        last_seen = dict.fromkeys((spec.name for spec in specs), time.monotonic())
        while True:
            if self._cluster.closed:
                raise CPDError("the cluster is stopping")
            with contextlib.suppress(ConfigError):  # Redis is away: go on when it is back
                pids = {member.id: member.pid for member in self._leases()}
                states = {spec.name: self._cluster.state(spec.name) for spec in specs}
                for spec in specs:
                    if error := start_error(spec, states[spec.name]):
                        raise CPDError(error)
                    if states[spec.name]:
                        last_seen[spec.name] = time.monotonic()
                    elif time.monotonic() - last_seen[spec.name] > SUPERVISOR_S:
                        raise CPDError(no_supervisor(spec))
                if all((state := states[spec.name]) is not None and spec.has_leases(state.pid, pids) for spec in specs):
                    started = started or time.monotonic()
                    lost = self._cluster.lost()
                    routers = [
                        spec.name
                        for spec in self._cluster.specs
                        if not (spec.is_worker or spec.name in lost or self._is_drained(spec))
                    ]
                    workers = {name: pids[name] for spec in specs if spec.is_worker for name in spec.members}
                    if has_workers(self.state, workers, routers):
                        return
                    if time.monotonic() - started > _SEEN_S:
                        raise CPDError(
                            f"{', '.join(spec.name for spec in specs)} run, but the routers do not all use them after"
                            f" {_SEEN_S:.0f} s; `cpd status` shows why"
                        )
            time.sleep(_POLL_S)

    def _meant(self, model: str, *, workers: bool) -> str:
        """Returns the model that is meant, empty if there is only one without a name in `models`.

        Raises:
            ConfigError: There is none of this name, or `workers` of one of several are meant, and it is not said which.
        """
        names = [one.name for one in self._plan.settings.models]
        if model and model not in names:
            has = f"has {', '.join(names)}" if names else "has one model: leave --model out"
            raise ConfigError(f"the cluster has no model {model!r}; it {has}")
        if workers and names and not model:
            raise ConfigError(f"say whose workers are meant, with --model: the cluster has {', '.join(names)}")
        return model

    def _check_memory(self, new: Collection[ProcessSpec]) -> None:
        """Raises CPDError if there is no memory for more workers on this machine or, for ever, on a shared device."""
        settings = self._plan.settings
        counts = Counter(spec.serves for spec in new if spec.is_worker)
        if not counts or settings.device != "cpu" or settings.ray_address or settings.simulate:
            return
        if settings.device_memory is not None:
            check_models(self._each_model(settings, new), running=True)
        else:
            check_models(
                [
                    settings.of_model(serves).model_copy(update={"combined": count, "prefill": 0})
                    for serves, count in counts.items()
                ]
            )

    def _each_model(self, settings: ClusterSettings, new: Collection[ProcessSpec] = ()) -> list[ClusterSettings]:
        """Returns the settings of each model's workers, with their present number and the `new` ones."""
        names = [one.name for one in settings.models] or [""]
        specs = [spec for spec in self._cluster.specs if not self._is_drained(spec)]
        counts = Counter((spec.serves, spec.kind) for spec in (*specs, *new))
        return [
            settings.of_model(name).model_copy(update={kind: counts[name, kind] for kind in _WORKERS}) for name in names
        ]

    def _forget_drained(self, keep: Collection[str] = ()) -> None:
        """Removes the processes that `cpd drain` has ended, but for those to `keep`."""
        for spec in self._cluster.specs:
            if self._is_drained(spec) and spec.name not in keep:
                self._cluster.stop(spec.name)

    def _is_drained(self, spec: ProcessSpec) -> bool:
        state = self._cluster.state(spec.name)
        return state is not None and state.pid is None and state.exit_code == EXIT_DRAINED

    def _indices(self, kind: Kind, serves: str = "") -> list[int]:
        return sorted(_index(spec) for spec in self._cluster.specs if (spec.kind, spec.serves) == (kind, serves))


def _without_numbers(settings: ClusterSettings) -> list[ServedModel]:
    """Returns the entries of `models` with the same numbers of workers."""
    return [one.model_copy(update={"combined": 1, "prefill": 0}) for one in settings.models]


def _index(spec: ProcessSpec) -> int:
    return int(spec.name.rpartition("-")[2])


def _model_of(spec: ProcessSpec) -> str:
    return spec.serves

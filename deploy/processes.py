"""The processes of a cluster, and their command lines."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import to_json

from cpd.common.settings import AllRoutersSettings, AllWorkersSettings, ClusterSettings, Settings, WorkersSettings
from cpd.common.trust import read_secret
from deploy.sealed import seal, unseal

Kind = Literal["combined", "prefill", "simulated", "router"]

_MODULES: dict[Kind, str] = {
    "combined": "decode_worker",
    "prefill": "prefill_worker",
    "simulated": "simulated_workers",
    "router": "router",
}
LAUNCH_MARK = "CPD_LAUNCH"
"""Environment variable of a cluster's processes, by which they are found after their `cpd up` was killed."""

_DROPPED = ("CPD_", "RAY_", "OMP_NUM_THREADS")
"""Variables that a child does not inherit: its settings are arguments, and Ray sets OMP_NUM_THREADS."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a cluster.

    Attributes:
        name: Name in logs.
        model: Checkpoint directory or Hugging Face id; empty for the router of several models, whose flags have them.
        members: Its ids in Redis and `/cluster`: its name, or the names of all workers that it simulates.
        flags: Settings by name, without the model; an empty value is a switch.
        sealed: Environment variables with secrets, where other users can't read them; encrypted (`deploy/sealed.py`).
        mark: Value of the environment variable LAUNCH_MARK.
        serves: Name of a worker's model if the cluster has several; else empty.
    """

    name: str
    kind: Kind
    model: str
    members: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    sealed: bytes = field(default=b"", repr=False)
    mark: str = ""
    serves: str = ""

    @property
    def is_worker(self) -> bool:
        """True if it runs workers, which need cores or a GPU."""
        return self.kind != "router"

    @property
    def listens_on(self) -> tuple[str, str, int]:
        """Cluster, host and port of a router."""
        fields = AllRoutersSettings.model_fields
        cluster, host, port = (self.flags.get(name, fields[name].default) for name in ("cluster", "host", "port"))
        return cluster, host, int(port)

    def has_leases(self, pid: int | None, leases: Mapping[str, int]) -> bool:
        """True if the process `pid` holds all its leases (process id by member)."""
        return pid is not None and all(leases.get(member) == pid for member in self.members)

    def command(self, model: str, **flags: str) -> list[str]:
        """Returns program and arguments, with this model and these additional flags."""
        # -P: ignores a folder named "router" in the working directory.
        command = [sys.executable, "-P", "-m", _MODULES[self.kind], *(["--model", model] if model else [])]
        for name, value in {**self.flags, **flags}.items():
            command += [f"--{name.replace('_', '-')}", *([value] if value else [])]
        return command

    def starts_like(self, other: "ProcessSpec") -> bool:
        """True if both start the same process: what is sealed looks different each time.

        Raises:
            ConfigError: As `environment`.
        """
        same = replace(self, sealed=b"") == replace(other, sealed=b"")
        return same and self._secrets() == other._secrets()

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the child's environment.

        Raises:
            ConfigError: This machine lacks the cluster's secret, or has another one.
        """
        kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
        extra = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", LAUNCH_MARK: self.mark}
        return {**kept, **extra, **self._secrets()}

    def _secrets(self) -> dict[str, str]:
        return unseal(read_secret(Path(self.flags["secret_file"])), self.sealed)


def processes(settings: ClusterSettings, worker_host: str) -> list[ProcessSpec]:
    """Returns all processes with which a cluster starts: combined workers, prefill workers, routers.

    Args:
        settings: With `redis_url`, `secret_file` and `port` filled in.
        worker_host: Interface that workers listen on.
    """
    if settings.simulate:
        flags, sealed = _given(settings, WorkersSettings)
        names = tuple(f"{kind}-{index}" for kind, index in _workers(settings))
        specs = [ProcessSpec("simulated", "simulated", settings.model, names, {**flags, "host": worker_host}, sealed)]
    else:
        specs = [
            process(settings, worker_host, kind, index, one.served_model_name if settings.models else "")
            for one in settings.each_model()
            for kind, index in _workers(one)
        ]
    return specs + [process(settings, worker_host, "router", index) for index in range(settings.routers)]


def _workers(settings: ClusterSettings) -> list[tuple[Kind, int]]:
    """Returns role and number of the workers with which a cluster of one model starts."""
    counts: dict[Kind, int] = {"combined": settings.combined, "prefill": settings.prefill}
    return [(kind, index) for kind, count in counts.items() for index in range(count)]


def name_of(kind: Kind, index: int, serves: str = "") -> str:
    """Returns the name of a process. `serves`: see `ProcessSpec`."""
    return f"{serves}-{kind}-{index}" if serves else f"{kind}-{index}"


def process(settings: ClusterSettings, worker_host: str, kind: Kind, index: int, serves: str = "") -> ProcessSpec:
    """Returns a worker or router. Arguments as in `processes` and `ProcessSpec`."""
    name = name_of(kind, index, serves)
    if kind == "router":
        flags, sealed = _given(settings, AllRoutersSettings)
        flags = {"router_id": name, **flags}
    else:
        settings = settings.of_model(serves)
        flags, sealed = _given(settings, AllWorkersSettings)
        served = {"served_model_name": serves} if serves else {}
        flags = {"worker_id": name, **served, **flags, "host": worker_host}
    return ProcessSpec(name, kind, settings.model, (name,), flags, sealed, serves=serves)


def _given(settings: ClusterSettings, wanted: type[Settings]) -> tuple[dict[str, str], bytes]:
    """Returns flags and sealed secrets for the settings that `wanted` has and that differ from its defaults."""
    flags: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, info in wanted.model_fields.items():
        value: Any = getattr(settings, name)
        if name == "model" or value == info.get_default(call_default_factory=True):
            continue
        if name == "redis_url":  # it may hold a password
            secrets["CPD_REDIS_URL"] = value
        elif name == "models":
            flags[name] = to_json([one.model_dump(exclude_defaults=True) for one in value]).decode()
        elif isinstance(value, list):
            secrets[f"CPD_{name.upper()}"] = ",".join(value)
        elif isinstance(value, BaseModel):
            flags[name] = value.model_dump_json(exclude_defaults=True)
        elif isinstance(value, bool):
            flags[name if value else f"no_{name}"] = ""
        else:
            flags[name] = str(int(value) if isinstance(value, int) else value)
    assert settings.secret_file is not None
    return flags, seal(read_secret(settings.secret_file), secrets)

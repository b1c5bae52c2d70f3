"""The processes of a cluster, and their command lines."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, SecretStr

from cpd.common.settings import AllRoutersSettings, AllWorkersSettings, ClusterSettings, Settings, WorkersSettings

Kind = Literal["combined", "prefill", "simulated", "router"]

_MODULES: dict[Kind, str] = {
    "combined": "decode_worker",
    "prefill": "prefill_worker",
    "simulated": "simulated_workers",
    "router": "router",
}
_DROPPED = ("CPD_", "RAY_", "OMP_NUM_THREADS")
"""Variables that a child does not inherit: its settings are arguments, and Ray sets OMP_NUM_THREADS."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a cluster.

    Attributes:
        name: Name in logs.
        model: Checkpoint directory or Hugging Face id.
        members: Its ids in Redis and `/cluster`: its name, or the names of all workers that it simulates.
        flags: Settings by name, without the model; an empty value is a switch.
        secrets: Environment variables with secrets, which other users can't read there.
    """

    name: str
    kind: Kind
    model: str
    members: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

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
        command = [sys.executable, "-P", "-m", _MODULES[self.kind], "--model", model]
        for name, value in {**self.flags, **flags}.items():
            command += [f"--{name.replace('_', '-')}", *([value] if value else [])]
        return command

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the child's environment."""
        kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
        return {**kept, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", **self.secrets}


def processes(settings: ClusterSettings, worker_host: str) -> list[ProcessSpec]:
    """Returns all processes of the cluster: combined workers, prefill workers, routers.

    Args:
        settings: With `redis_url`, `cluster_token` and `port` filled in.
        worker_host: Interface that workers listen on.
    """
    counts: list[tuple[Kind, int]] = [("combined", settings.combined), ("prefill", settings.prefill)]
    workers: list[tuple[Kind, str]] = [(kind, f"{kind}-{index}") for kind, count in counts for index in range(count)]
    if settings.simulate:
        flags, secrets = _given(settings, WorkersSettings)
        names = tuple(name for _, name in workers)
        specs = [ProcessSpec("simulated", "simulated", settings.model, names, {**flags, "host": worker_host}, secrets)]
    else:
        flags, secrets = _given(settings, AllWorkersSettings)
        specs = [
            ProcessSpec(name, kind, settings.model, (name,), {"worker_id": name, **flags, "host": worker_host}, secrets)
            for kind, name in workers
        ]
    flags, secrets = _given(settings, AllRoutersSettings)
    for index in range(settings.routers):
        name = f"router-{index}"
        specs.append(ProcessSpec(name, "router", settings.model, (name,), {"router_id": name, **flags}, secrets))
    return specs


def _given(settings: ClusterSettings, wanted: type[Settings]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns flags and secrets for the settings that `wanted` has and that differ from its defaults."""
    flags: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, info in wanted.model_fields.items():
        value: Any = getattr(settings, name)
        if name == "model" or value == info.get_default(call_default_factory=True):
            continue
        if isinstance(value, SecretStr):
            secrets[f"CPD_{name.upper()}"] = value.get_secret_value()
        elif name == "redis_url":  # it may hold a password
            secrets["CPD_REDIS_URL"] = value
        elif isinstance(value, list):
            secrets[f"CPD_{name.upper()}"] = ",".join(value)
        elif isinstance(value, BaseModel):
            flags[name] = value.model_dump_json(exclude_defaults=True)
        elif isinstance(value, bool):
            flags[name if value else f"no_{name}"] = ""
        else:
            flags[name] = str(int(value) if isinstance(value, int) else value)
    return flags, secrets

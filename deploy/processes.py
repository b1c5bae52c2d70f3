"""The processes of a cluster, and their command lines."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

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
        sealed: Environment variables with secrets, where other users can't read them; encrypted (`deploy/sealed.py`).
    """

    name: str
    kind: Kind
    model: str
    members: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    sealed: bytes = field(default=b"", repr=False)

    @property
    def is_worker(self) -> bool:
        """True if it runs workers, which need cores or a GPU."""
        return self.kind != "router"

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
        """Returns the child's environment.

        Raises:
            ConfigError: This machine lacks the cluster's secret, or has another one.
        """
        kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
        secrets = unseal(read_secret(Path(self.flags["secret_file"])), self.sealed)
        return {**kept, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", **secrets}


def processes(settings: ClusterSettings, worker_host: str) -> list[ProcessSpec]:
    """Returns all processes of the cluster: combined workers, prefill workers, routers.

    Args:
        settings: With `redis_url`, `secret_file` and `port` filled in.
        worker_host: Interface that workers listen on.
    """
    counts: list[tuple[Kind, int]] = [("combined", settings.combined), ("prefill", settings.prefill)]
    workers: list[tuple[Kind, str]] = [(kind, f"{kind}-{index}") for kind, count in counts for index in range(count)]
    if settings.simulate:
        flags, sealed = _given(settings, WorkersSettings)
        names = tuple(name for _, name in workers)
        specs = [ProcessSpec("simulated", "simulated", settings.model, names, {**flags, "host": worker_host}, sealed)]
    else:
        flags, sealed = _given(settings, AllWorkersSettings)
        specs = [
            ProcessSpec(name, kind, settings.model, (name,), {"worker_id": name, **flags, "host": worker_host}, sealed)
            for kind, name in workers
        ]
    flags, sealed = _given(settings, AllRoutersSettings)
    for index in range(settings.routers):
        name = f"router-{index}"
        specs.append(ProcessSpec(name, "router", settings.model, (name,), {"router_id": name, **flags}, sealed))
    return specs


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

"""The processes a cluster consists of, and the command line of each."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import SecretStr

from cpd.common.config import AllRoutersSettings, AllWorkersSettings, ClusterSettings, Settings, WorkersSettings

Kind = Literal["combined", "prefill", "simulated", "router"]

_MODULES: dict[Kind, str] = {
    "combined": "decode_worker",
    "prefill": "prefill_worker",
    "simulated": "simulated_workers",
    "router": "router",
}
_DROPPED = ("CPD_", "RAY_", "OMP_NUM_THREADS")
"""Not for a child: settings come as arguments, and Ray counts threads by its own rules."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a cluster.

    Attributes:
        name: Its id in logs.
        members: Under which ids it has leases in Redis, and is in `/cluster`: its name, or those of all the workers
            that it simulates.
        flags: Its settings by name, without the model; empty for a switch that is on.
        secrets: Settings that travel in the environment, where other users can't read them.
        model: Checkpoint directory or Hugging Face id.
    """

    name: str
    kind: Kind
    model: str
    members: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_worker(self) -> bool:
        """Whether it runs workers (and so needs cores or a GPU)."""
        return self.kind != "router"

    def has_leases(self, pid: int | None, leases: Mapping[str, int]) -> bool:
        """Whether the process `pid` holds all its leases (process id by member)."""
        return pid is not None and all(leases.get(member) == pid for member in self.members)

    def command(self, model: str, **flags: str) -> list[str]:
        """Program and arguments, with `model` in place of the spec's and `flags` added."""
        # -P: a folder named "router" where the user happens to be must not be taken for ours.
        command = [sys.executable, "-P", "-m", _MODULES[self.kind], "--model", model]
        for name, value in {**self.flags, **flags}.items():
            command += [f"--{name.replace('_', '-')}", *([value] if value else [])]
        return command

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The child's environment."""
        kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
        return {**kept, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", **self.secrets}


def processes(settings: ClusterSettings, worker_host: str) -> list[ProcessSpec]:
    """All processes of the cluster: combined workers, prefill workers, routers.

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
    """Those of `settings` that `wanted` knows and that differ from its defaults, as flags and as secrets."""
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
        elif isinstance(value, bool):
            flags[name if value else f"no_{name}"] = ""
        else:
            flags[name] = str(int(value) if isinstance(value, int) else value)
    return flags, secrets

"""The processes a cluster consists of, and the command line of each."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import SecretStr

from cpd.config import AllRoutersSettings, AllWorkersSettings, ClusterSettings, Settings

Kind = Literal["combined", "prefill", "router"]

_MODULES: dict[Kind, str] = {"combined": "decode_worker", "prefill": "prefill_worker", "router": "router"}
_DROPPED = ("CPD_", "RAY_", "OMP_NUM_THREADS")
"""Not for a child: settings come as arguments, and Ray counts threads by its own rules."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a cluster.

    Attributes:
        name: Its id everywhere: in Redis, in logs and in `/cluster`.
        flags: Its settings by name, without the model.
        secrets: Settings that travel in the environment, where other users can't read them.
        model: Checkpoint directory or Hugging Face id.
    """

    name: str
    kind: Kind
    model: str
    flags: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_worker(self) -> bool:
        """Whether it computes (and so needs cores or a GPU)."""
        return self.kind != "router"

    def command(self, model: str, **flags: str) -> list[str]:
        """Program and arguments, with `model` in place of the spec's and `flags` added."""
        # -P: a folder named "router" where the user happens to be must not be taken for ours.
        command = [sys.executable, "-P", "-m", _MODULES[self.kind], "--model", model]
        for name, value in {**self.flags, **flags}.items():
            command += [f"--{name.replace('_', '-')}", value]
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
    worker_flags, worker_secrets = _given(settings, AllWorkersSettings)
    router_flags, router_secrets = _given(settings, AllRoutersSettings)
    worker_flags["host"] = worker_host
    specs = []
    kinds: list[tuple[Kind, int]] = [("combined", settings.combined), ("prefill", settings.prefill)]
    for kind, count in kinds:
        for index in range(count):
            name = f"{kind}-{index}"
            flags = {"worker_id": name, **worker_flags}
            specs.append(ProcessSpec(name, kind, settings.model, flags, worker_secrets))
    for index in range(settings.routers):
        name = f"router-{index}"
        flags = {"router_id": name, **router_flags}
        specs.append(ProcessSpec(name, "router", settings.model, flags, router_secrets))
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
        elif isinstance(value, list):
            secrets[f"CPD_{name.upper()}"] = ",".join(value)
        else:
            flags[name] = str(int(value) if isinstance(value, int) else value)
    return flags, secrets

"""Shared by the parts of one worker process: its life cycle, its engine and its connections."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cpd.common.lifecycle import Lifecycle
from cpd.common.settings import WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import Profile
from engine.engine import Engine
from kvtransfer.base import PoolMemory, Transport
from worker.async_engine import AsyncEngine
from worker.grammars import Grammars
from worker.prefill_client import PrefillClient
from worker.resident import ModelUse
from worker.wire_format import Limits

if TYPE_CHECKING:
    from cpd.common.tracing import Tracing

EXIT_RESTART = 75
"""Exit code of a worker that must be restarted."""


class ModelMemory(Protocol):
    """The memory of weights and pool; see `engine/execution/cpu/model_memory.py`."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def staged_bytes(self) -> int: ...

    def resident_bytes(self) -> int: ...

    def release(self) -> None: ...

    def restore(self) -> None: ...

    def populate_pool(self) -> None: ...

    def stage(self) -> None: ...

    def unstage(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and its description.

    Attributes:
        memory: The KV pool as transports see it; it lives as long as the engine.
        page_bytes: Size of a page on the device; a simulated page takes less in `memory`.
        fingerprint: Equal on workers that can exchange pages.
        dtype: Types of activations and weights, for people. The pool has that of activations.
        device: The device and its kernels, for people to read.
        profile: The engine predicts its steps with it.
        token_budget: Most tokens of a batch on the whole device; 0: derived from the profile.
        progress: Returns a value that changes while a step is computed. Any thread may call it.
        grammars_of: The checkpoint for whose tokenizer grammars are compiled; None: outputs can't be constrained.
        model_memory: The memory that the model shares with others; None: it keeps its memory.
    """

    engine: Engine
    memory: PoolMemory
    page_bytes: int
    limits: Limits
    fingerprint: bytes
    dtype: str
    device: str
    profile: Profile
    token_budget: int
    progress: Callable[[], float]
    grammars_of: Path | None = None
    model_memory: ModelMemory | None = None


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """What a worker's model will take on its device, before it is loaded.

    Attributes:
        size: Of weights and KV pool, in bytes.
        fingerprint: Equal for workers whose models take the same.
    """

    size: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a role's service (`worker/service.py`) works with.

    Attributes:
        transport: Of the pool; open while the model has memory.
        prefill_client: Sends prefill requests to other workers.
        fingerprint: Equal on workers that can exchange pages.
        memory: The KV pool as transports see it.
        colocation: The engine's; it predicts prefill times.
        progress: See `LoadedEngine`.
        grammars: Compiles the grammars of requests.
        model: Whether the model sleeps.
        load_changed: Call it when a value in the load report may have changed.
        tracing: Sends spans; None without a collector.
    """

    worker_id: str
    settings: WorkerSettings
    engine: AsyncEngine
    transport: Transport
    prefill_client: PrefillClient
    limits: Limits
    fingerprint: bytes
    memory: PoolMemory
    colocation: Colocation
    progress: Callable[[], float]
    grammars: Grammars
    model: ModelUse
    lifecycle: Lifecycle
    load_changed: Callable[[], None]
    tracing: "Tracing | None" = None

"""Shared by the parts of one worker process: its life cycle, its engine and its connections."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpd.common.lifecycle import Lifecycle
from cpd.common.settings import WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import Profile
from engine.engine import Engine
from kvtransfer.base import PoolMemory, Transport
from worker.async_engine import AsyncEngine
from worker.grammars import Grammars
from worker.prefill_client import PrefillClient
from worker.wire_format import Limits

EXIT_RESTART = 75
"""Exit code of a worker that must be restarted."""


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


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a role's service (`worker/service.py`) works with.

    Attributes:
        prefill_client: Sends prefill requests to other workers.
        fingerprint: Equal on workers that can exchange pages.
        memory: The KV pool as transports see it.
        colocation: The engine's; it predicts prefill times.
        progress: See `LoadedEngine`.
        grammars: Compiles the grammars of requests.
        load_changed: Call it when a value in the load report may have changed.
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
    lifecycle: Lifecycle
    load_changed: Callable[[], None]

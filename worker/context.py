"""Shared by the parts of one worker process: its life cycle, its engine and its connections.

Life cycle:
    READY ──drain()──▶ DRAINING ──nothing left to do──▶ STOPPING
      └───────────────────stop()──────────────────────────▲

A draining worker takes nothing new. What runs may end by itself until the drain's time is over; then it is handed over
to other workers (`Service.hand_over`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from cpd.common.settings import WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import Profile
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from kvtransfer.base import PoolMemory, Transport
from worker.async_engine import AsyncEngine
from worker.prefill_client import PrefillClient
from worker.wire_format import Limits

log = logging.getLogger(__name__)

EXIT_RESTART = 75
"""Exit code of a worker that must be restarted."""


DRAIN_S = 30.0
"""Time of a drain unless another one is given, in seconds."""


class Lifecycle:
    """A worker's state and exit code.

    Args:
        on_change: Called when the state changed.

    Attributes:
        failed: The worker was not told to stop: its engine or a thread failed, or the engine hangs.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._deadline = inf
        self.failed = False
        self.state: pb.State.ValueType = pb.STATE_READY
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()
        self.exit_code = 0

    @property
    def time_is_over(self) -> bool:
        """True if the time of a drain is over."""
        return asyncio.get_running_loop().time() >= self._deadline

    def drain(self, reason: str, exit_code: int = 0, timeout_s: float | None = None) -> None:
        """Accepts no new requests, and stops when the running ones are done. Of several times the last one counts.

        Args:
            timeout_s: Time for the running requests to end by themselves; None takes DRAIN_S.
        """
        self._deadline = asyncio.get_running_loop().time() + (DRAIN_S if timeout_s is None else timeout_s)
        if not self.draining.is_set():
            log.info("draining: %s", reason)
            self.exit_code = exit_code
            self.state = pb.STATE_DRAINING
            self.draining.set()
            self._on_change()

    def stop(self, reason: str, exit_code: int | None = None) -> None:
        """Ends the worker now. `exit_code` says that it failed; without one, a drain under way keeps its own."""
        if not self.stopping.is_set():
            log.info("stopping: %s", reason)
            if exit_code is not None:
                self.exit_code, self.failed = exit_code, True
            self.state = pb.STATE_DRAINING
            self.draining.set()
            self.stopping.set()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and its description.

    Attributes:
        memory: The KV pool as transports see it; it lives as long as the engine.
        page_bytes: Size of a page on the device; a simulated page takes less in `memory`.
        fingerprint: Equal on workers that can exchange pages.
        dtype: The dtype of weights and pool.
        device: The device and its kernels, for people to read.
        profile: The engine predicts its steps with it.
        token_budget: Most tokens of a batch on the whole device; 0: derived from the profile.
        progress: Returns a value that changes while a step is computed. Any thread may call it.
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


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a role's service (`worker/service.py`) works with.

    Attributes:
        prefill_client: Sends prefill requests to other workers.
        fingerprint: Equal on workers that can exchange pages.
        memory: The KV pool as transports see it.
        colocation: The engine's; it predicts prefill times.
        progress: See `LoadedEngine`.
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
    lifecycle: Lifecycle
    load_changed: Callable[[], None]

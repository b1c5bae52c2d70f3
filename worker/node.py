"""What the parts of one worker process share: its life cycle and its facilities.

Life cycle:
    READY ──drain()──▶ DRAINING ──nothing left to do──▶ STOPPING
      └───────────────────stop()──────────────────────────▲
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cpd.common.config import WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import Profile
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from kvtransfer.base import PoolMemory, Transport
from worker.channels import Channels
from worker.convert import Limits
from worker.engine_bridge import EngineBridge

log = logging.getLogger(__name__)

EXIT_RESTART = 75
"""Exit code of a worker that cannot go on and wants to be started anew."""


class Lifecycle:
    """Whether the worker takes requests, and with which exit code it ends.

    Args:
        on_change: Called when the state changed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.state: pb.State.ValueType = pb.STATE_READY
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()
        self.exit_code = 0

    def drain(self, reason: str, exit_code: int = 0) -> None:
        """Takes no new requests and stops when the running ones are done."""
        if not self.draining.is_set():
            log.info("draining: %s", reason)
            self.exit_code = exit_code
            self.state = pb.STATE_DRAINING
            self.draining.set()
            self._on_change()

    def stop(self, reason: str, exit_code: int | None = None) -> None:
        """Ends the worker now. Without `exit_code` that of a drain under way stays."""
        if not self.stopping.is_set():
            log.info("stopping: %s", reason)
            if exit_code is not None:
                self.exit_code = exit_code
            self.state = pb.STATE_DRAINING
            self.draining.set()
            self.stopping.set()


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what a worker has to know about it.

    Attributes:
        memory: The KV pool as transports see it; it lives as long as the engine.
        page_bytes: What one page takes on the device; a simulated one has less in `memory`.
        fingerprint: Equal on workers that can exchange pages.
        dtype: Of weights and pool.
        device: What computes, and whose kernels, for people.
        profile: What the engine predicts its steps with.
        token_budget: Tokens that one batch on the whole device computes at most, if it is given; 0: as follows from the
            profile.
        progress: What it returns changes while a step is computed, however long that takes. Any thread may call it.
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
class Node:
    """One worker's facilities.

    Attributes:
        fingerprint: Equal on workers that can exchange pages.
        memory: The KV pool as transports see it.
        colocation: The engine's; predicts how long prompts take.
        progress: See `Loaded`.
        load_changed: To be called when something changed that the worker's load report shows.
    """

    worker_id: str
    settings: WorkerSettings
    engine: EngineBridge
    transport: Transport
    channels: Channels
    limits: Limits
    fingerprint: bytes
    memory: PoolMemory
    colocation: Colocation
    progress: Callable[[], float]
    lifecycle: Lifecycle
    load_changed: Callable[[], None]

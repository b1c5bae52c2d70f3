"""Many workers in one process and one event loop, each with its own engine, gRPC port and lease.

Only the devices and the network between them are simulated. Routers can't tell these workers from real ones. A worker
that ends by itself (its engine failed) is restarted, as by a supervisor; one that was drained is not.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cpd.common.lifecycle import on_stop_signals
from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from cpd.common.settings import Role, SimulatedSettings, WorkerSettings
from cpd.performance.model import PerfModel, Profile
from decode_worker.service import DecodeService
from engine.model.config import load_config
from kvtransfer.base import PoolMemory, Transport
from kvtransfer.local import LocalNetwork
from prefill_worker.service import PrefillService
from sim.device.fast_forward import Choose
from sim.device.runner import VirtualTime, chooser
from simulated_workers.engine import Load, make_loader, page_bytes_of
from simulated_workers.inline import InlineEngine
from simulated_workers.simulation import INSTANT, SIMULATED
from worker.worker import Worker

RESTART_S = 0.5
"""Delay before a worker that ended by itself is restarted."""


async def serve(settings: SimulatedSettings) -> int:
    """Runs all workers until a signal asks to stop.

    Returns:
        The process's exit code.

    Raises:
        CPDError: A worker can't start.
    """
    profile, config = Profile.load(settings.simulate), load_config(Path(settings.model))
    network = LocalNetwork(SIMULATED, _pages_ms(profile, page_bytes_of(profile, config)))
    choose = chooser(config.vocab_size) if settings.simulate == INSTANT else None
    host = Host(make_loader(profile, config), network, choose)
    on_stop_signals(host)
    shared = {
        name: getattr(settings, name) for name in SimulatedSettings.model_fields.keys() & WorkerSettings.model_fields
    }
    roles: tuple[tuple[Role, int], ...] = ("combined", settings.combined), ("prefill", settings.prefill)
    exit_codes = await asyncio.gather(
        *(
            host.run(WorkerSettings.load({**shared, "worker_id": f"{role}-{index}"}), role)
            for role, count in roles
            for index in range(count)
        )
    )
    if EXIT_SUPERSEDED in exit_codes:
        return EXIT_SUPERSEDED
    return EXIT_DRAINED if all(code == EXIT_DRAINED for code in exit_codes) else 0


class Host:
    """Runs the workers of this process.

    Args:
        load: Makes a worker's engine.
        network: Moves the workers' pages.
        choose: See `InlineEngine`.
    """

    def __init__(self, load: Load, network: LocalNetwork, choose: Choose | None = None) -> None:
        self._load = load
        self._network = network
        self._choose = choose
        self._workers: set[Worker] = set()
        self._stopping = asyncio.Event()

    def terminate(self, reason: str) -> None:
        """Drains all workers; the second call ends them."""
        self._stopping.set()
        for worker in self._workers:
            worker.lifecycle.terminate(reason)

    def stop(self, reason: str) -> None:
        """Ends all workers."""
        self._stopping.set()
        for worker in self._workers:
            worker.lifecycle.stop(reason)

    async def run(self, settings: WorkerSettings, role: Role) -> int:
        """Runs one worker, restarting it when it ends, until `stop` is called.

        A worker that was drained on request is not restarted, nor is one whose id a newer process has taken: then all
        workers of this process end.

        Returns:
            EXIT_DRAINED or EXIT_SUPERSEDED for these workers, 0 for the others.

        Raises:
            CPDError: The worker can't start.
        """
        while not self._stopping.is_set():
            clock = VirtualTime()
            worker = Worker(
                settings,
                role,
                DecodeService,
                PrefillService,
                build_engine=partial(self._load, clock=clock),
                make_engine=partial(InlineEngine, clock=clock, choose=self._choose),
                open_transport=self._open,
            )
            self._workers.add(worker)
            try:
                exit_code = await worker.run()
            finally:
                self._workers.remove(worker)
            if exit_code == EXIT_SUPERSEDED:
                self.stop(f"a newer process has the id {worker.id}")
                return exit_code
            if exit_code == EXIT_DRAINED:
                return exit_code
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RESTART_S)
        return 0

    async def _open(self, name: str, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str) -> Transport:
        """Opens a transport on the simulated network, as `worker.worker.Worker` asks for it."""
        return self._network.create(memory, epoch=epoch)


def _pages_ms(profile: Profile, page_bytes: int) -> Callable[[int], float]:
    """Makes a function that gives the time to send a number of pages."""
    model = PerfModel(profile)
    return lambda pages: model.transfer_ms(pages * page_bytes)

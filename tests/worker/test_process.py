import asyncio
import importlib
import os
import threading

import pytest

from cpd.common.errors import TransferError
from cpd.common.lifecycle import Lifecycle
from cpd.common.settings import WorkerSettings
from kvtransfer.nixl.writer import Writer
from kvtransfer.segments import Addresses
from tests.waiting import DEADLINE_S
from worker.context import EXIT_RESTART
from worker.process import on_failed_threads


class BrokenGpu:
    """A writer back end on a GPU that can't tell whether a write is still in progress."""

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses) -> int:
        return 0

    def written(self, handle: int) -> bool:
        return True

    def close(self) -> None:
        raise TransferError("cudaDeviceSynchronize failed")


async def test_a_failed_thread_restarts_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # so that it is put back
    lifecycle = Lifecycle(30.0)
    on_failed_threads(lifecycle.stop)
    writer = Writer("kvtransfer-nixl-send")
    writer.open(BrokenGpu, lambda error: None)
    closing = asyncio.create_task(writer.close())
    async with asyncio.timeout(DEADLINE_S):
        await lifecycle.stopping.wait()
    assert lifecycle.exit_code == EXIT_RESTART
    assert not closing.done()
    closing.cancel()


@pytest.mark.parametrize("role", ["decode_worker", "prefill_worker"])
def test_cuda_gets_enough_hardware_queues_before_it_starts(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_WAIT_POLICY", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    queues: list[str | None] = []
    monkeypatch.setattr("worker.process.run", lambda *_: queues.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    importlib.import_module(f"{role}.__main__").run(WorkerSettings())
    assert queues == ["32"]

import asyncio
import threading

import pytest

from cpd.common.errors import TransferError
from kvtransfer.nixl.writer import Pages, Writer
from tests.waiting import DEADLINE_S
from worker.node import EXIT_RESTART, Lifecycle
from worker.process import on_failed_threads


class BrokenGpu:
    """A door of which nobody can tell whether something is still being written through it."""

    def write(self, own: Pages, theirs: Pages, counts: Pages) -> int:
        return 0

    def written(self, handle: int) -> bool:
        return True

    def close(self) -> None:
        raise TransferError("cudaDeviceSynchronize failed")


async def test_a_worker_is_to_be_started_anew_when_nobody_can_tell_that_a_connection_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # so that it is put back
    lifecycle = Lifecycle(lambda: None)
    on_failed_threads(lifecycle.stop)
    writer = Writer("kvtransfer-nixl-send")
    writer.open(BrokenGpu, lambda error: None)
    closing = asyncio.create_task(writer.close())
    async with asyncio.timeout(DEADLINE_S):
        await lifecycle.stopping.wait()
    assert lifecycle.exit_code == EXIT_RESTART
    assert not closing.done()
    closing.cancel()

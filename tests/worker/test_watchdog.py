import asyncio

import pytest

from kvtransfer.local import LocalNetwork
from tests.engine.fakes import make_request, prompt
from tests.waiting import DEADLINE_S, eventually
from tests.worker.client import Client
from tests.worker.cluster import running
from tests.worker.fakes import Gate, fake_loader
from worker.context import EXIT_RESTART
from worker.watchdog import hang


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.watchdog.HANG_S", 0.12)


class Passes:
    """An engine's passes and progress, as the watchdog sees them, until it hangs in a pass."""

    def __init__(self, activity: str) -> None:
        self.looks = 0
        self.hanging = False
        self._activity = activity

    def passing(self) -> int:
        self.looks += not self.hanging
        if self._activity == "with nothing" and not self.hanging:
            return 0
        return self.looks if self._activity == "with one pass after the other" else 1

    def progress(self) -> float:
        return float(self.looks) if self._activity == "within a pass" else 0.0


@pytest.mark.parametrize("activity", ["with one pass after the other", "within a pass", "with nothing"])
async def test_progress_or_idleness_is_not_a_hang(activity: str) -> None:
    passes = Passes(activity)
    watch = asyncio.create_task(hang(passes.passing, passes.progress))
    await eventually(lambda: passes.looks > 200)
    assert not watch.done()
    passes.hanging = True
    async with asyncio.timeout(DEADLINE_S):
        await watch


async def test_a_worker_with_a_hanging_step_asks_for_a_restart(redis_url: str) -> None:
    gate = Gate()
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait)) as w,
        Client(w) as c,
    ):
        gate.close()
        await c.submit(make_request("a", prompt(8), max_tokens=3), 1)
        async with asyncio.timeout(DEADLINE_S):
            assert await w.task == EXIT_RESTART
        gate.open()


async def test_a_worker_with_a_hanging_prefill_lane_asks_for_a_restart(redis_url: str) -> None:
    """Also while decodes make progress beside it."""
    gate = Gate()
    async with (
        running(
            "combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait, lanes=True)
        ) as w,
        Client(w) as c,
    ):
        gate.slow()
        decodes = await c.submit(make_request("a", prompt(8), max_tokens=1000), 1)
        await eventually(lambda: decodes.started)
        await c.submit(make_request("b", prompt(100), max_tokens=3), 2)
        async with asyncio.timeout(DEADLINE_S):
            assert await w.task == EXIT_RESTART

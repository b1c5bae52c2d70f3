import asyncio

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.waiting import eventually
from worker.load import LoadReporter


class Worker:
    """Its load, and what was published of it."""

    def __init__(self) -> None:
        self.load = pb.Load(state=pb.STATE_READY)
        self.published: list[pb.Load] = []
        self.reporter = LoadReporter(self._current, self.published.append)

    def _current(self) -> pb.Load:
        load = pb.Load()
        load.CopyFrom(self.load)
        return load

    def set(self, **fields: int) -> None:
        self.load.MergeFrom(pb.Load(**fields))  # type: ignore[arg-type]
        self.reporter.changed()


async def test_the_first_change_goes_out_at_once_and_the_last_one_is_never_lost() -> None:
    worker = Worker()
    worker.set(running=1)
    assert [load.running for load in worker.published] == [1]
    for running in range(2, 50):
        worker.set(running=running)
    assert len(worker.published) == 1
    await eventually(lambda: worker.published[-1].running == 49)
    assert len(worker.published) == 2
    worker.reporter.close()


async def test_nothing_new_is_nothing_to_send() -> None:
    worker = Worker()
    worker.set(running=1)
    worker.reporter.changed()
    await asyncio.sleep(0.15)  # an interval
    worker.reporter.changed()
    assert len(worker.published) == 1
    worker.reporter.close()


async def test_a_report_goes_out_now_and_then_though_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.load.HEARTBEAT_S", 0.05)
    worker = Worker()
    await eventually(lambda: len(worker.published) == 3)
    assert worker.published == [worker.load] * 3
    worker.reporter.close()


async def test_becoming_idle_or_busy_goes_out_at_once() -> None:
    worker = Worker()
    worker.set(running=1)
    worker.load.running = 0
    worker.reporter.changed()
    worker.set(waiting=1)
    assert [(load.running, load.waiting) for load in worker.published] == [(1, 0), (0, 0), (0, 1)]
    worker.reporter.close()

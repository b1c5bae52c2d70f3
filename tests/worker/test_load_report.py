import asyncio

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.waiting import eventually
from worker.load_report import LoadReporter


@pytest.fixture(autouse=True)
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.load_report.HEARTBEAT_S", 3600.0)


class Worker:
    """A worker's load, and the loads that were published."""

    def __init__(self) -> None:
        self.load = pb.Load(state=pb.STATE_READY)
        self.published: list[pb.Load] = []
        self.counted = 0
        self.reporter = LoadReporter(self._current, self._urgent, self.published.append)

    def _urgent(self) -> tuple[int, int, bool]:
        return self.load.state, self.load.residency.state, self.load.running + self.load.waiting > 0

    def _current(self) -> pb.Load:
        self.counted += 1
        load = pb.Load()
        load.CopyFrom(self.load)
        return load

    def set(self, **fields: int) -> None:
        self.load.MergeFrom(pb.Load(**fields))  # type: ignore[arg-type]
        self.reporter.changed()


async def test_the_first_change_is_sent_at_once_and_the_last_is_never_lost() -> None:
    worker = Worker()
    worker.set(running=1)
    assert [load.running for load in worker.published] == [1]
    for running in range(2, 50):
        worker.set(running=running)
    assert len(worker.published) == 1
    assert worker.counted == 1  # no report is made before one is due
    await eventually(lambda: worker.published[-1].running == 49)
    assert len(worker.published) == 2
    worker.reporter.close()


async def test_an_unchanged_load_is_not_sent() -> None:
    worker = Worker()
    worker.set(running=1)
    worker.reporter.changed()
    await asyncio.sleep(0.15)  # an interval
    worker.reporter.changed()
    assert len(worker.published) == 1
    worker.reporter.close()


async def test_an_unchanged_load_is_sent_as_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.load_report.HEARTBEAT_S", 0.05)
    worker = Worker()
    await eventually(lambda: len(worker.published) >= 3)
    assert worker.published[:3] == [worker.load] * 3
    worker.reporter.close()


async def test_another_state_of_the_model_is_sent_at_once() -> None:
    worker = Worker()
    states = [pb.Residency.STATE_SERVING, pb.Residency.STATE_DRAINING, pb.Residency.STATE_ASLEEP]
    for state in states:
        worker.load.residency.state = state
        worker.reporter.changed()
    assert [load.residency.state for load in worker.published] == states
    worker.reporter.close()


async def test_a_drain_is_sent_at_once() -> None:
    worker = Worker()
    worker.set(running=1)
    worker.set(state=pb.STATE_DRAINING)
    assert [load.state for load in worker.published] == [pb.STATE_READY, pb.STATE_DRAINING]
    worker.reporter.close()


async def test_becoming_idle_or_busy_is_sent_at_once() -> None:
    worker = Worker()
    worker.set(running=1)
    worker.load.running = 0
    worker.reporter.changed()
    worker.set(waiting=1)
    assert [(load.running, load.waiting) for load in worker.published] == [(1, 0), (0, 0), (0, 1)]
    worker.reporter.close()

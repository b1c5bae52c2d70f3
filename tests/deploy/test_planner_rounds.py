"""What a planner does round after round, on a clock of its own, with a fake of the cluster that it sees and changes."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import deploy.planner
from cpd.common.errors import CPDError
from cpd.common.planner_lease import PlannerLease
from cpd.common.redis_client import Redis
from cpd.common.settings import Role
from cpd.common.trust import ClusterSecret
from cpd.performance.profiles import find_profile
from cpd.planner.arrivals import Arrivals
from cpd.planner.capacity import Targets
from cpd.planner.planner import Plan
from deploy.planner import GONE_S, INTERVAL_S, RETRY_S, STEADY_S, Bounds, ClusterPlanner, may_end
from router.operations.peer_routers import PeerAnswer
from router.operations.planner_view import PlannedWorker, PlannerView

PROFILE = find_profile("h200-qwen3-8b").read_text()
LONG, CHAT = (20_000, 20_000, 20_000), (2_100, 250, 1_600)


class FakeCluster:
    """What routers tell and workers do, and the clock.

    Attributes:
        workers: Those that are ready, by name.
        refusing: Names of workers that keep their role.
        slo_ttft: The routers' target.
        busy: The lock of whoever changes the cluster.
        said: What the planner has said.
    """

    def __init__(self, workers: int, monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int] | None = None) -> None:
        self.now = 1000.0
        self.workers: dict[str, PlannedWorker] = {}
        self.refusing: set[str] = set()
        self.slo_ttft = 2000.0
        self.busy = threading.Lock()
        self.said: list[str] = []
        self._arrivals = Arrivals()
        self._starts = 0
        for number in range(workers):
            self.start(f"combined-{number}")
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1e9 + self.now)
        monkeypatch.setattr(deploy.planner, "time", clock)
        monkeypatch.setattr(deploy.planner, "members", self._members)
        monkeypatch.setattr(deploy.planner, "read_plan", self._read_plan)
        monkeypatch.setattr(deploy.planner, "set_role", self._set_role)
        resize = Bounds(*bounds, self._resize) if bounds else None
        self.planner = ClusterPlanner("act", "", "c", ClusterSecret("secret"), self.busy, self.said.append, resize)
        monkeypatch.setattr(self.planner, "_ask", self._ask)

    def start(self, name: str, role: Role = "combined") -> None:
        self._starts += 1
        self.workers[name] = {
            "id": name,
            "role": role,
            "address": "",
            "incarnation": self._starts,
            "requests": 0,
            "cached_pages": 0,
        }

    async def run(self, seconds: float, request: tuple[int, int, int] | None = None, each_round: int = 30) -> None:
        """Lets rounds pass, in each of which requests arrive."""
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            for _ in range(each_round if request else 0):
                self._arrivals.answered(self._arrivals.arrived(*cast(tuple[int, int, int], request)), 250)
            await self.planner._round(cast(Redis, None), cast(PlannerLease, _Lease()))
            if self.planner._resizing is not None:
                await self.planner._resizing

    @property
    def prefill_workers(self) -> list[str]:
        return [name for name, one in sorted(self.workers.items()) if one["role"] == "prefill"]

    @property
    def report(self) -> Any:
        return self.planner._last

    async def _members(self, *_: Any) -> list[Any]:
        return []

    async def _read_plan(self, *_: Any) -> tuple[bytes, bool]:
        return b"", False

    async def _ask(self, routers: Any) -> list[PlannerView]:
        performance = {
            "profile": PROFILE,
            "token_budget": 2048,
            "colocate": "auto",
            "decode_shares": [0.12, 0.24, 0.48, 0.76],
            "max_num_seqs": 256,
            "num_pages": 44_000,
            "slowdown": 1.0,
        }
        view = {
            "router": "router-0",
            "began": self._arrivals.began,
            "arrivals": self._arrivals.totals(),
            "slo_ttft": self.slo_ttft,
            "slo_itl": 50.0,
            "expected_output": 256,
            "workers": [one.copy() for one in self.workers.values()],
            "performance": [performance],
        }
        return [cast(PlannerView, view)]

    def _set_role(self, name: str, address: str, key: str, role: Role) -> None:
        if name in self.refusing:
            raise CPDError(f"{name} keeps its role")
        self.workers[name]["role"] = role

    def _resize(self, wanted: int, ready: Sequence[str]) -> list[str]:
        ending = list(ready[: max(0, len(ready) - wanted)])
        for name in ending:
            del self.workers[name]
        for number in range(wanted):
            if f"combined-{number}" not in self.workers and len(self.workers) < wanted:
                self.start(f"combined-{number}")
        return ending


class _Lease:
    async def hold(self, plan: bytes = b"") -> str:
        return ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCluster]:
    return lambda workers, bounds=None: FakeCluster(workers, monkeypatch, bounds)


async def test_roles_follow_the_load(cluster: Callable[..., FakeCluster]) -> None:
    it = cluster(8)
    await it.run(60, LONG)
    assert 3 <= len(it.prefill_workers) < 8
    await it.run(300, CHAT, each_round=300)
    assert it.prefill_workers == []
    assert it.report["changes_total"] == len(it.report["changes"]) == 2


async def test_the_prefill_workers_end_first_and_a_combined_one_is_left(cluster: Callable[..., FakeCluster]) -> None:
    it = cluster(8, (1, 8))
    await it.run(60, LONG)
    assert it.prefill_workers
    await it.run(1200)
    assert [one["role"] for one in it.workers.values()] == ["combined"]
    await it.run(120, LONG)
    assert len(it.workers) == 8
    assert it.prefill_workers


async def test_without_a_combined_worker_one_is_made(cluster: Callable[..., FakeCluster]) -> None:
    it = cluster(3)
    for one in it.workers.values():
        one["role"] = "prefill"
    it.workers["combined-1"]["requests"] = -1
    it.start("combined-3")
    await it.run(30)
    assert it.prefill_workers == ["combined-0", "combined-1", "combined-2"]
    del it.workers["combined-3"]
    await it.run(STEADY_S)
    assert it.prefill_workers == ["combined-0", "combined-1", "combined-2"], "it may be restarting"
    await it.run(2 * INTERVAL_S)
    assert it.prefill_workers == ["combined-0", "combined-2"]
    assert "no combined worker is ready" in it.said[-1]


async def test_without_workers_it_waits(cluster: Callable[..., FakeCluster]) -> None:
    with pytest.raises(CPDError, match="no worker is ready"):
        await cluster(0).run(INTERVAL_S)


async def test_while_somebody_else_changes_the_cluster_nothing_counts_as_a_change(
    cluster: Callable[..., FakeCluster],
) -> None:
    it = cluster(8)
    with it.busy:
        await it.run(200, LONG)
        assert (it.prefill_workers, it.report["changes"], it.said) == ([], [], [])
    await it.run(INTERVAL_S, LONG)
    assert it.prefill_workers


async def test_if_no_worker_changes_it_is_tried_again_later_and_counts_as_no_change(
    cluster: Callable[..., FakeCluster],
) -> None:
    it = cluster(8)
    it.refusing = set(it.workers)
    await it.run(30 + 3 * RETRY_S, LONG)
    assert it.report["changes"] == []
    assert it.report["reason"].startswith("good requests/s by prefill workers")
    assert len([line for line in it.said if "combined-7 keeps its role" in line]) == len(it.said) == 4
    it.refusing = set()
    await it.run(RETRY_S, LONG)
    assert it.prefill_workers
    assert it.report["changes_total"] == 1


async def test_a_worker_gets_its_role_back_after_a_restart_but_not_after_a_long_time(
    cluster: Callable[..., FakeCluster],
) -> None:
    it = cluster(8)
    await it.run(60, LONG)
    one, other = it.prefill_workers[:2]
    it.start(one)
    await it.run(INTERVAL_S)
    assert one in it.prefill_workers
    del it.workers[other]
    await it.run(GONE_S + 2 * INTERVAL_S)
    it.start(other)
    await it.run(INTERVAL_S)
    assert other not in it.prefill_workers
    assert set(it.report["roles"]) == set(it.prefill_workers)


async def test_a_worker_with_the_name_of_one_that_was_ended_is_a_new_one(cluster: Callable[..., FakeCluster]) -> None:
    it = cluster(8, (1, 8))
    await it.run(60, LONG)
    before = it.prefill_workers
    it.planner._resized_at = it.now - RETRY_S
    await it.planner._resize(cast(Bounds, it.planner._bounds), 2, may_end(list(it.workers.values())))
    it.start(before[0])
    await it.run(INTERVAL_S)
    assert before[0] not in it.prefill_workers


async def test_changed_targets_are_planned_for(
    cluster: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    it, planned = cluster(2), list[float]()
    await it.run(INTERVAL_S)
    state = it.planner._state
    assert state is not None

    def plan(demands: Any, seen: Any, fleet: Any, targets: Targets, current: int, now: float) -> Plan:
        planned.append(targets.slo_ttft)
        return Plan(current, current, "")

    monkeypatch.setattr(state.planner, "plan", plan)
    await it.run(INTERVAL_S)
    it.slo_ttft = 9000.0
    await it.run(INTERVAL_S)
    assert planned == [2000.0, 9000.0]


async def test_a_cluster_with_several_models_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peers:
        def __init__(self, *_: Any) -> None: ...

        async def ask(self, *_: Any) -> list[PeerAnswer]:
            return [PeerAnswer("router-0", 409, b"", "Conflict")]

    monkeypatch.setattr(deploy.planner, "PeerRouters", Peers)
    planner = ClusterPlanner("act", "", "c", ClusterSecret("secret"), threading.Lock(), print)
    with pytest.raises(CPDError, match="the cluster has several models"):
        await planner._ask([])


async def test_a_bug_in_a_round_does_not_end_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    said, ended = list[str](), threading.Event()

    async def failing(*_: Any) -> None:
        if said:
            ended.set()
        else:
            raise ZeroDivisionError("a bug")

    planner = ClusterPlanner("act", "redis://127.0.0.1:1", "c", ClusterSecret("secret"), threading.Lock(), said.append)
    monkeypatch.setattr(deploy.planner, "INTERVAL_S", 0.01)
    monkeypatch.setattr(planner, "_round", failing)
    await asyncio.wait_for(planner.run(ended), 60)
    assert said == ["The planner waits: it failed: ZeroDivisionError('a bug')", "The planner plans again"]


def test_of_two_workers_the_one_without_streams_ends_first() -> None:
    def worker(name: str, role: str, requests: int) -> PlannedWorker:
        return cast(PlannedWorker, {"id": name, "role": role, "requests": requests, "cached_pages": 0})

    workers = [
        worker("a", "combined", 0),
        worker("b", "combined", 3),
        worker("c", "prefill", 9),
        worker("d", "prefill", 1),
        worker("e", "combined", 0),
    ]
    assert may_end(workers) == ["d", "c", "e", "a", "b"]

"""The planner of a running cluster: which workers change, what is said, and what happens without a cluster."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from rich.console import Console

from cpd.common.errors import ConfigError
from cpd.common.planner_lease import PlannerLease
from cpd.common.settings import ClusterSettings
from cpd.common.trust import ClusterSecret
from cpd.planner.report import PlanReport, parse_report
from deploy.plan import describe
from deploy.planner import LEASE_S, ClusterPlanner, check_bounds, in_order
from deploy.redis import EmbeddedRedis, embedded_redis
from router.operations.planner_view import PlannedWorker

SECRET = ClusterSecret("the secret of this cluster")
REPORT: PlanReport = {
    "mode": "act",
    "at": 1000.0,
    "workers": 4,
    "current": 1,
    "prefill_workers": 2,
    "reason": "good requests/s by prefill workers: 12.0 with 2, 11.0 with 1",
    "wanted_workers": 5,
    "size_reason": "the present ones are too few",
    "demands": [
        {"rate": 3.5, "local_tokens": 900, "remote_tokens": 950, "prompt_tokens": 4000, "output_tokens": 120},
    ],
    "scale": 1.35,
    "predictions": [
        {
            "prefill_workers": number,
            "good_per_s": 12.0 - abs(2 - number),
            "good_share": 0.9,
            "prefill_busy": 0.5,
            "combined_busy": 0.25,
            "streams": 3.25,
        }
        for number in range(4)
    ],
    "predicted_at": 995.0,
    "changes": [
        {
            "at": 0.0,
            "before": 0,
            "after": 1,
            "workers": ["combined-2"],
            "reason": "better",
            "error": "combined-1 is lost",
        }
    ],
    "changes_total": 7,
    "roles": {"combined-2": {"role": "prefill", "incarnation": 5}},
}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as server:
        yield server


def _planner(redis: EmbeddedRedis, said: list[str], ended: threading.Event) -> ClusterPlanner:
    def say(sentence: str) -> None:
        said.append(sentence)
        ended.set()

    return ClusterPlanner("act", redis.url, "c", SECRET, threading.Lock(), say)


def _worker(name: str, role: str, requests: int = 0, cached_pages: int = 0) -> PlannedWorker:
    return {
        "id": name,
        "role": role,
        "address": "127.0.0.1:1",
        "incarnation": 1,
        "requests": requests,
        "cached_pages": cached_pages,
    }


def test_the_worker_with_the_fewest_requests_and_cached_pages_changes() -> None:
    workers = [
        _worker("d", "combined", 2, 0),
        _worker("c", "combined", 1, 20),
        _worker("b", "combined", 1, 10),
        _worker("a", "combined", 1, 20),
        _worker("p", "prefill"),
    ]
    assert [one["id"] for one in in_order(workers, "prefill")] == ["b", "a", "c", "d"]
    assert [one["id"] for one in in_order(workers, "combined")] == ["p"]


def _shown(report: PlanReport, **arguments: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for part in describe(report, **arguments):
        console.print(part, markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_is_explained() -> None:
    shown = _shown(REPORT, alive=True, now=1003.0)
    assert "The planner changes roles. It decided 3 s ago:" in shown
    assert "1 of 4 workers prefill, 2 should: good requests/s by prefill workers: 12.0 with 2, 11.0 with 1" in shown
    assert "Workers that should run: 5 (the present ones are too few)" in shown
    assert "Predicted 8 s ago, for 1.35 times the measured load:" in shown
    assert ["2", "12.00", "90%", "50%", "25%", "3.2"] in [line.split() for line in shown.splitlines()]
    assert ["3.50", "4,000", "900", "950", "120"] in [line.split() for line in shown.splitlines()]
    assert "Changes: 7, the last ones:" in shown
    assert "0 to 1 (combined-2): better; combined-1 is lost" in shown


def test_a_planner_that_is_away_is_said_to_be() -> None:
    assert "The planner is away. It decided 103 s ago, the last time:" in _shown(REPORT, alive=False, now=1103.0)


def test_a_report_of_another_version_is_no_report() -> None:
    assert parse_report(b'{"mode": "act"}') is None
    assert parse_report(b"") is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"planner": "off"}, "is for a planner"),
        ({"min_workers": 5}, "--min-workers 5 is more than --max-workers 4"),
        ({"simulate": "instant"}, "simulated workers"),
        ({"prefill": 4}, "--prefill 4 leaves no combined worker within --max-workers 4"),
    ],
)
def test_bounds_that_contradict_other_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_bounds(ClusterSettings.load({"planner": "act", "max_workers": 4, **settings}))


async def test_a_planner_without_routers_says_so_once_and_gives_its_lease_back(redis: EmbeddedRedis) -> None:
    said: list[str] = []
    ended = threading.Event()
    await _planner(redis, said, ended).run(ended)
    assert said == ["The planner waits: no router answers (none is there)"]
    async with Redis.from_url(redis.url) as client:
        assert await PlannerLease(client, "c", SECRET, "other", LEASE_S).hold() == ""


async def test_a_planner_waits_while_another_one_plans(redis: EmbeddedRedis) -> None:
    said: list[str] = []
    ended = threading.Event()
    async with Redis.from_url(redis.url) as client:
        await PlannerLease(client, "c", SECRET, "other", LEASE_S).hold()
        await _planner(redis, said, ended).run(ended)
    assert said == ["The planner waits: other plans for this cluster"]


async def test_a_planner_without_redis_waits(redis: EmbeddedRedis) -> None:
    said: list[str] = []
    ended = threading.Event()
    redis.stop()
    await _planner(redis, said, ended).run(ended)
    assert len(said) == 1
    assert said[0].startswith("The planner waits: Redis does not answer: ")

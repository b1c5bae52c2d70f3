from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cpd.common.planner_lease import PlannerLease, read_plan
from cpd.common.trust import ClusterSecret
from deploy.redis import embedded_redis
from tests.waiting import DEADLINE_S

SECRET = ClusterSecret("the secret of this cluster")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis.url


@pytest.fixture
async def redis(url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(url) as client:
        yield client


def _lease(redis: Redis, name: str, ttl_s: float = DEADLINE_S) -> PlannerLease:
    return PlannerLease(redis, "c", SECRET, name, ttl_s)


async def test_one_of_two_planners_plans(redis: Redis) -> None:
    one, other = _lease(redis, "one"), _lease(redis, "other")
    assert await one.hold(b"{}") == ""
    assert await other.hold(b"[]") == "one"
    assert await read_plan(redis, "c", SECRET) == (b"{}", True)
    assert await one.hold() == "", "it renews its own lease"


async def test_another_planner_takes_over_and_knows_the_last_plan(redis: Redis) -> None:
    one, other = _lease(redis, "one"), _lease(redis, "other")
    await one.hold(b"{}")
    await other.release()
    assert await other.hold() == "one", "only the holder gives the lease back"
    await one.release()
    assert await read_plan(redis, "c", SECRET) == (b"{}", False)
    assert await other.hold() == ""
    assert await read_plan(redis, "c", SECRET) == (b"{}", True)


async def test_a_lease_that_is_not_renewed_ends(redis: Redis) -> None:
    await _lease(redis, "one", ttl_s=0.001).hold(b"{}")
    while await _lease(redis, "other").hold():  # Redis's clock goes on
        pass
    assert await read_plan(redis, "c", SECRET) == (b"{}", True)


async def test_a_plan_that_no_process_of_the_cluster_wrote_is_ignored(redis: Redis) -> None:
    await _lease(redis, "one").hold(b"{}")
    for value in (b"{}", b" {}", b"00 {}", b"nonsense", b"\xff {}"):
        await redis.hset("cpd:c:planner", "plan", value)
        assert await read_plan(redis, "c", SECRET) == (b"", True)
    assert await read_plan(redis, "another", SECRET) == (b"", False)

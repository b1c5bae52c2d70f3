import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from cpd.membership import Member, lease, members
from deploy.redis import EmbeddedRedis, embedded_redis

MEMBER = Member("combined-0", "combined", "127.0.0.1:1", "here", 42, 7)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - nothing tells when Redis changes
            await asyncio.sleep(0.02)


async def test_a_member_is_listed_while_its_lease_is_held(redis: Redis) -> None:
    async with lease(redis, "c", MEMBER, ttl_s=5):
        await eventually(lambda: _listed(redis))
        assert await members(redis, "c") == [MEMBER]
        assert await members(redis, "other") == []
    assert await members(redis, "c") == []


async def test_a_lease_is_renewed_before_it_runs_out(redis: Redis) -> None:
    async with lease(redis, "c", MEMBER, ttl_s=3):
        await eventually(lambda: _listed(redis))
        [key] = await redis.keys("*")
        await redis.pexpire(key, 60)  # as if no renewal had come for long
        await eventually(lambda: _renewed(redis, key))


async def test_the_lease_of_a_killed_holder_runs_out(server: EmbeddedRedis, redis: Redis) -> None:
    holder = (
        "import asyncio, os, signal\n"
        "from redis.asyncio import Redis\n"
        "from cpd.membership import Member, lease, members\n"
        "async def main():\n"
        f"    redis = Redis.from_url({server.url!r})\n"
        "    async with lease(redis, 'c', Member('x', 'combined', 'a', 'h', 1, 1), 0.4):\n"
        "        while not await members(redis, 'c'): await asyncio.sleep(0.02)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", holder)
    assert await process.wait() == -9
    await eventually(lambda: _listed(redis, count=0))


async def test_a_lease_comes_back_after_redis_was_away(server: EmbeddedRedis, redis: Redis) -> None:
    async with lease(redis, "c", MEMBER, ttl_s=0.4):
        await eventually(lambda: _listed(redis))
        server.stop()
        server.start()
        await eventually(lambda: _listed(redis))


async def _listed(redis: Redis, count: int = 1) -> bool:
    try:
        return len(await members(redis, "c")) == count
    except RedisConnectionError:
        return False


async def _renewed(redis: Redis, key: bytes | str) -> bool:
    return bool(await redis.pttl(key) > 100)

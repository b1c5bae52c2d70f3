import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from cpd.common.membership import Member, lease, members
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
        await redis.pexpire(key, 60)  # as if there had been no renewal for a long time
        await eventually(lambda: _renewed(redis, key))


async def test_the_lease_of_a_killed_holder_runs_out(server: EmbeddedRedis, redis: Redis) -> None:
    holder = (
        "import asyncio, os, signal\n"
        "from redis.asyncio import Redis\n"
        "from cpd.common.membership import Member, lease, members\n"
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


UNREADABLE = {
    "no JSON": b"{",
    "not UTF-8": b'{"id": "\xff"}',
    "no object": b"[1]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "nothing in it": b"{}",
    "no address": orjson.dumps({"id": "x", "kind": "router", "host": "h", "pid": 1, "incarnation": 1}),
    "a number for a text": orjson.dumps(asdict(MEMBER) | {"address": 7}),
    "a text for a number": orjson.dumps(asdict(MEMBER) | {"incarnation": "7"}),
    "an unknown kind": orjson.dumps(asdict(MEMBER) | {"kind": "poet"}),
}


async def test_a_lease_with_fields_of_a_later_version_is_read_without_them(redis: Redis) -> None:
    await redis.set("cpd:c:member:combined-0", orjson.dumps(asdict(MEMBER) | {"colour": {"is": "blue"}}))
    assert await members(redis, "c") == [MEMBER]


@pytest.mark.parametrize("lease", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_lease_that_cannot_be_read_is_skipped_and_logged_once(
    redis: Redis, lease: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.set("cpd:c:member:combined-0", orjson.dumps(asdict(MEMBER)))
    await redis.set("cpd:c:member:bad", lease)
    unreadable: set[str] = set()
    for _ in range(3):
        assert await members(redis, "c", unreadable) == [MEMBER]
    await redis.set(b"cpd:c:member:worse\xff", lease)
    for _ in range(3):
        assert await members(redis, "c", unreadable) == [MEMBER]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "'cpd:c:member:bad'" in told[0]
    assert "'cpd:c:member:worse\\xff'" in told[1]
    assert all(len(line.splitlines()) == 1 for line in told)
    await redis.delete("cpd:c:member:bad")
    assert await members(redis, "c", unreadable) == [MEMBER]
    assert len(unreadable) == 1


async def _listed(redis: Redis, count: int = 1) -> bool:
    try:
        return len(await members(redis, "c")) == count
    except RedisConnectionError:
        return False


async def _renewed(redis: Redis, key: bytes | str) -> bool:
    return bool(await redis.pttl(key) > 100)

"""The record in a real Redis."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import KEEP_S, Ledger, Look
from cpd.residency.record import Activity, Record, Waiting, joined, pinned, woken
from cpd.residency.snapshot import ModelState
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.cpd.residency.world import entry, owner

SECRET, NO_SECRET = ClusterSecret("secret"), ClusterSecret("")
KEY = "cpd:c:device:here"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


def ledger(redis: Redis, secret: ClusterSecret = SECRET, host: str = "here") -> Ledger:
    return Ledger(redis, "c", secret, host)


async def record_of(one: Ledger) -> Record:
    look = await one.look()
    assert look.record is not None
    return look.record


async def test_a_record_is_read_as_it_was_written(redis: Redis) -> None:
    one = ledger(redis)
    assert (await one.look()).record is None
    await one.start(10)
    assert await record_of(one) == Record(10)
    written = Record(
        10, entries=(entry(1, 4, state=ModelState.SERVING),), intents=(Waiting("w1", 1.5, 2.5),), pins=("w1",)
    )
    assert await one.write(await one.look(), written)
    assert await record_of(ledger(redis)) == written
    assert (await ledger(redis, host="there").look()).record is None


async def test_a_hundred_concurrent_writers_lose_no_update(redis: Redis) -> None:
    await ledger(redis).start(10)
    writers = [ledger(redis) for _ in range(100)]

    def adds(name: str) -> "asyncio.Future[Record | None]":
        def change(look: Look) -> Record:
            assert look.record is not None
            return pinned(look.record, name, True)

        return asyncio.ensure_future(writers[int(name)].change(change))

    await asyncio.gather(*(adds(str(number)) for number in range(100)))
    assert set((await record_of(writers[0])).pins) == {str(number) for number in range(100)}
    assert sum(one.conflicts for one in writers) > 0


async def test_of_two_wakers_on_one_version_one_wins(redis: Redis) -> None:
    a, b = ledger(redis), ledger(redis)
    await a.start(10)
    await a.write(await a.look(), Record(10, entries=(entry(1, 4), entry(2, 4))))
    looks = await asyncio.gather(a.look(), b.look())
    records = [look.record for look in looks]
    assert records[0] is not None
    assert records[1] is not None
    won = await asyncio.gather(
        a.write(looks[0], woken(records[0], "w1", looks[0].now)),
        b.write(looks[1], woken(records[1], "w2", looks[1].now)),
    )
    assert sorted(won) == [False, True]
    assert (a.conflicts, b.conflicts) in ((0, 1), (1, 0))
    assert sum(one.state is ModelState.WAKING for one in (await record_of(a)).entries) == 1


async def test_a_record_that_was_lost_has_another_version_so_no_old_decision_is_written(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    old = await one.look()
    await redis.flushall()
    assert not await one.write(old, Record(10, pins=("old",)))
    await one.start(10)
    new = await one.look()
    assert int(new.version) > int(old.version)
    assert not await one.write(old, Record(10, pins=("old",)))


async def test_a_record_from_before_counts_as_lost_once(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    one = ledger(redis)
    await one.start(10)
    before = await redis.hget(KEY, "record")
    assert before is not None
    await one.change(lambda look: joined(Record(10), entry(1, 4, state=ModelState.SERVING)))
    assert (await record_of(one)).reserved_bytes == 4
    await redis.hset(KEY, "record", before)
    look = await one.look()
    assert look.record is None
    assert "is older than the last one" in caplog.text
    assert await one.write(look, Record(10, settles_at_s=look.now))
    assert (await record_of(one)).settles_at_s == look.now


async def test_versions_grow_even_if_redis_clock_is_set_back(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    value = await redis.hget(KEY, "record")
    assert isinstance(value, bytes)
    ahead = int(value.split()[0]) + 10**9
    await redis.hset(KEY, "record", str(ahead).encode() + b" " + value.split(b" ", 1)[1])
    look = await one.look()
    assert await one.write(look, Record(10, pins=("a",)))
    assert int((await one.look()).version) == ahead + 1


async def test_times_are_those_of_redis_clock(redis: Redis) -> None:
    one = ledger(redis)
    seconds, _ = await redis.time()
    look = await one.look(owner(1).key, Activity(waiting=3))
    assert seconds <= look.now <= seconds + 60
    assert look.activities[owner(1).key].seen_s == look.now
    later = await one.look()
    assert later.now > look.now
    assert later.activities[owner(1).key].seen_s == look.now
    assert later.activities[owner(1).key].activity == Activity(waiting=3)


async def test_activities_of_workers_that_have_left_are_forgotten(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    for number in (1, 2):
        await one.look(owner(number).key)
    await one.write(await one.look(), Record(10, entries=(entry(1, 4),)))
    assert list((await one.look()).activities) == [owner(1).key]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"17", b"17 nonsense", b"17 00 {}", "é".encode()])
async def test_an_unreadable_record_counts_as_lost_and_can_be_replaced(
    redis: Redis, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one = ledger(redis)
    await redis.hset(KEY, "record", damage)
    with caplog.at_level(logging.WARNING):
        look = await one.look()
        await one.look()
    assert look.record is None
    assert caplog.text.count("counts as lost") == (1 if damage else 0)
    assert await one.write(look, Record(10))
    assert await record_of(one) == Record(10)


async def test_a_record_without_the_clusters_signature_counts_as_lost(redis: Redis) -> None:
    forger, one = ledger(redis, ClusterSecret("another secret")), ledger(redis)
    await forger.start(10)
    await forger.look(owner(1).key, Activity(waiting=1))
    look = await one.look()
    assert (look.record, look.activities) == (None, {})
    await one.start(10)
    signed = await redis.hget(KEY, "record")
    assert isinstance(signed, bytes)
    await redis.hset(KEY, "record", signed.replace(b'"total_bytes":10', b'"total_bytes":99'))
    assert (await one.look()).record is None
    await redis.hset("cpd:c:device:there", "record", signed)
    assert (await ledger(redis, host="there").look()).record is None


async def test_without_a_secret_records_are_not_signed(redis: Redis) -> None:
    one = ledger(redis, NO_SECRET)
    await one.start(10)
    assert await record_of(one) == Record(10)


async def test_workers_left_over_from_before_get_time_to_write_themselves_back(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    assert (await record_of(one)).settles_at_s == 0
    await one.change(lambda look: joined(Record(10), entry(1, 4, state=ModelState.SERVING)))
    await one.start(20)
    look = await one.look()
    assert look.record is not None
    assert look.now < look.record.settles_at_s < look.now + 6
    assert look.record == Record(20, look.record.settles_at_s)


async def test_a_record_ends_with_its_cluster_and_lives_as_long_as_somebody_looks(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    await redis.pexpire(KEY, 1000)
    await one.look()
    assert await redis.pttl(KEY) > KEEP_S * 900
    await one.look(owner(1).key)
    await one.remove()
    assert not await redis.keys("*")
    await one.remove()


async def test_a_change_of_nothing_writes_nothing(redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    before = (await one.look()).version
    assert await one.change(lambda look: None) is None
    assert (await one.look()).version == before


async def test_redis_errors_are_raised(server: EmbeddedRedis, redis: Redis) -> None:
    one = ledger(redis)
    await one.start(10)
    look = await one.look()
    server.stop()
    with pytest.raises(RedisConnectionError):
        await one.look()
    with pytest.raises(RedisConnectionError):
        await one.write(look, replace(Record(10), pins=("a",)))


async def test_the_documented_rights_in_redis_are_enough(server: EmbeddedRedis, redis: Redis) -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    rule = re.findall(r"^ACL SETUSER (.*)$", text, re.MULTILINE)[0]
    await cast(Any, redis).execute_command("ACL", "SETUSER", *rule.replace("PASSWORD", "sesame").split())
    async with Redis(unix_socket_path=server.url.removeprefix("unix://"), username="cpd", password="sesame") as client:
        one = ledger(client)
        await one.start(10)
        await one.look(owner(1).key)
        assert await one.write(await one.look(), Record(10, entries=(entry(1, 4),)))
        await one.remove()

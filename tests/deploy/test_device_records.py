import asyncio
import socket
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cpd.common.errors import ConfigError
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.residency.record import Record
from deploy.device_records import device_records
from deploy.redis import embedded_redis

SECRET = ClusterSecret("secret")


async def record_of(url: str, host: str) -> Record | None:
    async with Redis.from_url(url) as redis:
        return (await Ledger(redis, "c", SECRET, host).look()).record


async def keys(url: str) -> list[bytes | str]:
    async with Redis.from_url(url) as redis:
        return list(await redis.keys("*"))


def test_each_machine_has_a_record_until_the_cluster_ends(tmp_path: Path) -> None:
    hosts = {socket.gethostname(), "there"}
    with embedded_redis(tmp_path / "redis.sock") as redis:
        with device_records(redis.url, "c", SECRET, 9, lambda: hosts):
            for host in hosts:
                assert asyncio.run(record_of(redis.url, host)) == Record(9)
            hosts.add("later")
            asyncio.run(_look(redis.url, "later"))
        assert asyncio.run(keys(redis.url)) == []


def test_a_redis_that_ends_first_is_no_error_but_one_that_is_not_there_is(tmp_path: Path) -> None:
    with embedded_redis(tmp_path / "redis.sock") as redis, device_records(redis.url, "c", SECRET, 9, lambda: {"here"}):
        redis.stop()
    with (
        pytest.raises(ConfigError, match="Redis does not answer"),
        device_records(redis.url, "c", SECRET, 9, lambda: {"here"}),
    ):
        pass


async def _look(url: str, host: str) -> None:
    async with Redis.from_url(url) as redis:
        await Ledger(redis, "c", SECRET, host).start(9)

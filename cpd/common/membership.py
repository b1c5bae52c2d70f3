"""Leases in Redis: which processes are alive, and where.

A process keeps one key, `cpd:<cluster>:member:<id>`, whose value describes the process. The key expires after
`--lease-s` seconds (`lease_s` in `cpd/common/settings.py`); the process renews it four times within them.
Whether a worker really serves is known from the session with it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Literal

import orjson
from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A live process of the cluster.

    Attributes:
        id: Unique name.
        kind: Its role.
        address: `host:port` of its gRPC server (of its HTTP server for a router).
        host: Name of its machine.
        pid: Its process id on that machine.
        incarnation: Random number, new at every start of the process.
        admin: `host:port` where a router answers only for itself; empty for workers.
        session: `host:port` where a worker takes sessions and prefill requests; empty for routers.
    """

    id: str
    kind: Literal["prefill", "combined", "router"]
    address: str
    host: str
    pid: int
    incarnation: int
    admin: str = ""
    session: str = ""


_LEASE = TypeAdapter(Member)


def _key(cluster: str, member_id: str) -> str:
    return f"cpd:{cluster}:member:{member_id}"


@contextlib.asynccontextmanager
async def lease(redis: Redis, cluster: str, member: Member, ttl_s: float) -> AsyncIterator[None]:
    """Keeps `member` listed while the context is open, and removes it at the end.

    Redis may be unreachable meanwhile: the lease is renewed as soon as it answers again.
    """
    key, value, ttl_ms = _key(cluster, member.id), orjson.dumps(asdict(member)), int(ttl_s * 1000)
    ended = asyncio.Event()

    async def renew() -> None:
        away = False
        while not ended.is_set():
            try:
                await redis.set(key, value, px=ttl_ms)
                if away:
                    log.info("Redis answers again")
                away = False
            except (RedisError, OSError) as error:
                if not away:
                    log.warning("Redis does not answer; going on without it: %s", error)
                away = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ttl_s / 4):
                    await ended.wait()

    task = asyncio.create_task(renew(), name="lease")
    try:
        yield
    finally:
        # Cancelling alone is not enough: the Redis client's own timeouts can swallow it.
        ended.set()
        await asyncio.wait([task], timeout=1)
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(RedisError, OSError):
            await redis.delete(key)


async def members(redis: Redis, cluster: str, unreadable: set[str] | None = None) -> list[Member]:
    """Returns the members with a live, readable lease. Unknown fields are ignored.

    Args:
        unreadable: Names of the leases that could not be read in the last call, updated here. Only new ones are logged.

    Raises:
        RedisError, OSError: Redis does not answer.
    """
    keys = [key async for key in redis.scan_iter(_key(cluster, "*"), count=1000)]
    values = await redis.mget(keys) if keys else []
    found: list[Member] = []
    failed: dict[str, str] = {}
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            try:
                found.append(_LEASE.validate_json(value, strict=True))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                failed[repr(key)] = ": ".join((*map(str, first["loc"]), first["msg"]))
    for name in failed.keys() - (unreadable or ()):
        log.warning("the lease %s can't be read and is ignored: %s", name, failed[name])
    if unreadable is not None:
        unreadable.clear()
        unreadable.update(failed)
    return found

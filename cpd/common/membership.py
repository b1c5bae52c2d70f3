"""Leases in Redis: which processes are alive, and where.

The leases of a cluster are one hash, `cpd:<cluster>:leases`, with an entry for each process:

    id → "<expires_ms> <incarnation> <signature> <the Member as JSON>"

The signature (HMAC-SHA256 in hex, of cluster, id and JSON) shows that a process with the cluster's secret wrote the
lease, so whoever can write to Redis can't send anybody to an address of his own. Leases with a wrong one are ignored.
Without a secret there is no signature.

A process renews its lease four times within `--lease-s` seconds (`lease_s` in `cpd/common/settings.py`). All times are
those of Redis's own clock. A script replaces or removes an entry only after comparing incarnations, so of two processes
with the same id the one that registered last keeps the lease, and the other one learns so when it renews. Reading
removes the entries that have expired; Redis drops the hash when all have. Whether a worker really serves is known from
the session with it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

import orjson
from pydantic import TypeAdapter, ValidationError

from cpd.common.redis_client import Redis, RedisError
from cpd.common.trust import ClusterSecret

log = logging.getLogger(__name__)

_RENEW = """
local leases, id, incarnation, member, ttl_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local expires_ms, other, holder = string.match(redis.call('HGET', leases, id) or '', '^(%d+) (%d+) (.*)$')
if holder and tonumber(expires_ms) > now_ms and tonumber(other) > tonumber(incarnation) then
  return holder
end
redis.call('HSET', leases, id, string.format('%.0f %s %s', now_ms + ttl_ms, incarnation, member))
if redis.call('PTTL', leases) < ttl_ms then
  redis.call('PEXPIRE', leases, ttl_ms)
end
"""
"""Registers or renews a lease; returns the Member of a newer process instead if that has the lease."""

_REMOVE = """
local leases, id, incarnation = KEYS[1], ARGV[1], ARGV[2]
if string.match(redis.call('HGET', leases, id) or '', '^%d+ (%d+) ') == incarnation then
  redis.call('HDEL', leases, id)
end
"""

_READ_ALL = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local live = {}
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local id, entry = entries[i], entries[i + 1]
  local expires_ms, member = string.match(entry, '^(%d+) %d+ (.*)$')
  if member and tonumber(expires_ms) <= now_ms then
    redis.call('HDEL', KEYS[1], id)
  else
    live[#live + 1] = id
    live[#live + 1] = member or entry
  end
end
return live
"""
"""Returns id, Member, id, Member, … and removes the leases that have expired. Unknown entries are returned whole."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live process of the cluster.

    Attributes:
        id: Unique name.
        kind: Its role.
        address: `host:port` of its gRPC server (of its HTTP server for a router); with TLS, a worker's is
            `host:port#fingerprint` (`cpd/common/tls.py`).
        host: Name of its machine.
        pid: Its process id on that machine.
        incarnation: Time when it first reached Redis, by Redis's clock, in µs; 0 until then. Of two processes with the
            same id, the one with the higher incarnation is the newer.
        admin: Where a router answers only for itself, like a worker's `address`; empty for workers.
        session: Where a worker takes sessions and prefill requests, like `address`; empty for routers.
        model: Name in `models:` of the model that a worker serves; empty in a cluster with one model.
    """

    id: str
    kind: Literal["prefill", "combined", "router"]
    address: str
    host: str
    pid: int
    incarnation: int = 0
    admin: str = ""
    session: str = ""
    model: str = ""


_MEMBER = TypeAdapter(Member)


def _key(cluster: str) -> str:
    return f"cpd:{cluster}:leases"


class _UnreadableError(Exception):
    """A lease is damaged or not signed by a process of the cluster; the message says which."""


def _signed(secret: ClusterSecret, cluster: str, member: Member) -> bytes:
    """Returns a lease's value."""
    described = orjson.dumps(asdict(member))
    signature = secret.sign("lease", cluster.encode(), member.id.encode(), described)
    return b"%b %b" % (signature.hex().encode(), described) if signature else described


def _read(secret: ClusterSecret, cluster: str, member_id: bytes, value: bytes) -> Member:
    """Returns the member of a lease. Unknown fields are ignored.

    Raises:
        _UnreadableError: It can't be used.
    """
    signature, described = (b"", value) if value.startswith(b"{") else value.partition(b" ")[::2]
    try:
        code = bytes.fromhex(signature.decode())
    except ValueError:
        code = b""
    if not secret.verify(code, "lease", cluster.encode(), member_id, described):
        raise _UnreadableError("it is not signed with the cluster's secret, or was changed afterwards")
    try:
        member = _MEMBER.validate_json(described, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _UnreadableError(": ".join((*map(str, first["loc"]), first["msg"]))) from None
    if member.id.encode() != member_id:
        raise _UnreadableError(f"it is that of {member.id!r}")
    return member


@contextlib.asynccontextmanager
async def lease(
    redis: Redis,
    cluster: str,
    secret: ClusterSecret,
    member: Member,
    ttl_s: float,
    on_superseded: Callable[[], None],
) -> AsyncIterator[None]:
    """Keeps `member` listed while the context is open, and removes it at the end.

    Redis may be unreachable meanwhile: the lease is renewed as soon as it answers again.

    Args:
        secret: Signs the lease.
        member: This process, without an incarnation.
        on_superseded: Called once if a newer process has taken the lease. It is not renewed any more, and this process
            must end.
    """
    key = _key(cluster)
    renew, remove = redis.register_script(_RENEW), redis.register_script(_REMOVE)
    ended = asyncio.Event()
    forged = ""

    async def renewed() -> bytes | None:
        """Renews the lease; returns a newer process's lease instead if that has the id."""
        nonlocal forged
        value = _signed(secret, cluster, member)
        arguments: list[str | int | bytes] = [member.id, member.incarnation, value, int(ttl_s * 1000)]
        holder: bytes | None = await renew([key], arguments)
        if holder is None:
            return None
        try:
            if _read(secret, cluster, member.id.encode(), holder).incarnation <= member.incarnation:
                raise _UnreadableError("its incarnation was changed")
        except _UnreadableError as error:  # no process of the cluster wrote it
            if forged != str(error):
                forged = str(error)
                log.warning("the lease of %s was overwritten and is restored: %s", member.id, error)
            await redis.hdel(key, member.id)
            holder = await renew([key], arguments)
        return holder

    async def keep() -> None:
        nonlocal member
        away = False
        while not ended.is_set():
            try:
                if not member.incarnation:
                    seconds, microseconds = await redis.time()
                    member = replace(member, incarnation=seconds * 1_000_000 + microseconds)
                holder = await renewed()
                if away:
                    log.info("Redis answers again")
                away = False
                if holder is not None:
                    log.critical(
                        "a newer process has the id %s, so this one ends for good. The newer one: %s",
                        member.id,
                        holder.decode(errors="backslashreplace"),
                    )
                    on_superseded()
                    return
            except (RedisError, OSError) as error:
                if not away:
                    log.warning("Redis does not answer; going on without it: %s", error)
                away = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ttl_s / 4):
                    await ended.wait()

    task = asyncio.create_task(keep(), name="lease")
    try:
        yield
    finally:
        # Cancelling alone is not enough: the Redis client's own timeouts can swallow it.
        ended.set()
        await asyncio.wait([task], timeout=1)
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(RedisError, OSError):
            await remove([key], [member.id, member.incarnation])


async def members(
    redis: Redis, cluster: str, secret: ClusterSecret, unreadable: set[str] | None = None
) -> list[Member]:
    """Returns the members with a live, readable lease that has the cluster's signature.

    Args:
        secret: Without one, signatures are not checked.
        unreadable: Ids of the leases that could not be read in the last call, updated here. Only new ones are logged.

    Raises:
        RedisError, OSError: Redis does not answer.
    """
    found: list[Member] = []
    failed: dict[str, str] = {}
    live: list[bytes] = await redis.register_script(_READ_ALL)([_key(cluster)])
    for member_id, value in zip(live[::2], live[1::2], strict=True):
        try:
            found.append(_read(secret, cluster, member_id, value))
        except _UnreadableError as error:
            failed[repr(member_id)] = str(error)
    for name in failed.keys() - (unreadable or ()):
        log.warning("the lease of %s is ignored: %s", name, failed[name])
    if unreadable is not None:
        unreadable.clear()
        unreadable.update(failed)
    return found

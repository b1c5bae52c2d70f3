"""The record of a device in Redis, and its changes by compare-and-swap.

It is a hash, `cpd:<cluster>:device:<host>`:

    record            → "<version> <signature> <the Record as JSON>"
    activity:<owner>  → "<seen_us> <signature> <the Activity as JSON>", one for each worker (`Owner.key`)

A script writes the record only if its version is still the one that the change was computed from. The next version is
the time of Redis's clock in µs, or one more than the last if that is higher. So a version never comes again, also if
Redis was emptied in between. The signature (HMAC-SHA256 in hex, of cluster, host and JSON) shows that a process with
the cluster's secret wrote it, as for leases. A record counts as lost if it can't be read, has a wrong signature, or is
older than one that was read before: Redis came back with an earlier state.

A look at the record writes the own activity in the same call. Each look keeps the hash for another KEEP_S, so a
cluster that was killed leaves nothing behind.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cpd.common.errors import CPDError
from cpd.common.redis_client import Redis
from cpd.common.trust import ClusterSecret
from cpd.residency.record import (
    SETTLE_S,
    Activity,
    Record,
    SeenActivity,
    UnreadableRecordError,
    dump,
    parse_activity,
    parse_record,
)

log = logging.getLogger(__name__)

KEEP_S = 3600.0
"""Time for which a record outlives the last look at it, in seconds."""

MOST_CONFLICTS = 1000
"""`Ledger.change` gives up after this many: others change the record all the time."""

_LONGEST_PAUSE_S = 0.1

_LOOK = """
local key, owner, activity, keep_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now_us = string.format('%.0f', time[1] * 1000000 + time[2])
if owner ~= '' then
  redis.call('HSET', key, 'activity:' .. owner, now_us .. ' ' .. activity)
end
redis.call('PEXPIRE', key, keep_ms)
return {now_us, redis.call('HGETALL', key)}
"""
"""Writes an activity unless `owner` is empty; returns Redis's time in µs and all fields."""

_WRITE = """
local key, expected, record, keep_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local version = string.match(redis.call('HGET', key, 'record') or '', '^(%d+) ') or ''
if version ~= expected then
  return ''
end
local time = redis.call('TIME')
local number = time[1] * 1000000 + time[2]
if version ~= '' and tonumber(version) >= number then
  number = tonumber(version) + 1
end
version = string.format('%.0f', number)
redis.call('HSET', key, 'record', version .. ' ' .. record)
redis.call('PEXPIRE', key, keep_ms)
for i = 4, #ARGV do
  redis.call('HDEL', key, 'activity:' .. ARGV[i])
end
return version
"""
"""Writes the record if it still has the expected version (empty: none), and forgets activities. Returns the version, or
an empty text if somebody else was first."""

_REMOVE = """
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  redis.call('HDEL', KEYS[1], fields[i])
end
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the record has shown.

    Attributes:
        now: Redis's time, in seconds.
        version: Of the record; empty if there is none.
        record: None if there is none that can be read.
        activities: Last activity of each process, by `Owner.key`.
    """

    now: float
    version: str
    record: Record | None
    activities: Mapping[str, SeenActivity] = field(default_factory=dict)


class Ledger:
    """The record of one device, as one process sees it.

    Args:
        host: Name of the device's machine.

    Attributes:
        conflicts: Number of writes so far that came too late, because somebody else had changed the record.
    """

    def __init__(self, redis: Redis, cluster: str, secret: ClusterSecret, host: str) -> None:
        self.conflicts = 0
        self._redis = redis
        self._key = f"cpd:{cluster}:device:{host}"
        self._about = cluster.encode(), host.encode()
        self._secret = secret
        self._scripts = [redis.register_script(script) for script in (_LOOK, _WRITE, _REMOVE)]
        self._known = "", Record(0)  # the last record that was read, by its version
        self._unreadable = ""

    async def look(self, owner: str = "", activity: Activity | None = None) -> Look:
        """Returns the record and all activities, and writes this worker's activity.

        Args:
            owner: `Owner.key` of this worker; empty: it has none.

        Raises:
            RedisError, OSError: Redis does not answer.
        """
        own = self._signed("activity", dump(activity or Activity()), owner) if owner else b""
        now_us, found = await self._scripts[0]([self._key], [owner, own, int(KEEP_S * 1000)])
        fields: dict[bytes, bytes] = dict(zip(found[::2], found[1::2], strict=True))
        version, record = self._read_record(fields.get(b"record", b""))
        activities = {}
        for name, value in fields.items():
            if name.startswith(b"activity:"):
                try:
                    key = name.removeprefix(b"activity:").decode()
                    seen_us, _, rest = value.partition(b" ")
                    activities[key] = SeenActivity(
                        int(seen_us) / 1e6, parse_activity(self._verified("activity", rest, key))
                    )
                except (UnreadableRecordError, ValueError):
                    log.debug("an activity in %s can't be read: %r", self._key, name)
        return Look(int(now_us) / 1e6, version, record, activities)

    async def write(self, look: Look, record: Record) -> bool:
        """Writes a record that was computed from `look`. False: somebody else has changed it since.

        Raises:
            RedisError, OSError: Redis does not answer; the record may have been written or not.
        """
        owners = {one.owner.key for one in record.entries}
        left = [key for key in look.activities if key not in owners]
        arguments: list[str | int | bytes] = [
            look.version,
            self._signed("device", dump(record)),
            int(KEEP_S * 1000),
            *left,
        ]
        if await self._scripts[1]([self._key], arguments):
            return True
        self.conflicts += 1
        return False

    async def change(self, change: Callable[[Look], Record | None]) -> Record | None:
        """Reads, computes and writes until nobody else was faster; returns what was written.

        Args:
            change: Returns the new record; None: there is nothing to change.

        Raises:
            CPDError: Others were faster each time.
            RedisError, OSError: Redis does not answer.
        """
        for attempt in range(MOST_CONFLICTS):
            look = await self.look()
            record = change(look)
            if record is None or await self.write(look, record):
                return record
            await asyncio.sleep(pause_s(attempt))
        raise CPDError(f"{self._key} in Redis is changed all the time")

    async def start(self, total_bytes: int) -> None:
        """Makes the record of a cluster that starts. Workers left over from before have SETTLE_S to write themselves
        back into it.

        Raises:
            CPDError, RedisError, OSError: As `change`.
        """

        def fresh(look: Look) -> Record:
            nobody = not look.version or (look.record is not None and not look.record.entries)
            return Record(total_bytes, 0.0 if nobody else look.now + SETTLE_S)

        await self.change(fresh)

    async def remove(self) -> None:
        """Removes the record.

        Raises:
            RedisError, OSError: Redis does not answer.
        """
        await self._scripts[2]([self._key])

    def _read_record(self, value: bytes) -> tuple[str, Record | None]:
        """Returns version and record; an empty version and None without one."""
        number, space, rest = value.partition(b" ")
        version = number.decode() if space and number.isdigit() else ""
        if version and version == self._known[0]:
            return self._known
        if version and self._known[0] and int(version) < int(self._known[0]):
            log.warning("the record %s in Redis is older than the last one, and counts as lost", self._key)
            self._known = "", Record(0)  # Redis's clock may have been set back: the next record is taken as it is
            return version, None
        try:
            if not value:
                return "", None
            record = parse_record(self._verified("device", rest))
        except UnreadableRecordError as error:
            if self._unreadable != (reason := str(error)):
                self._unreadable = reason
                log.warning("the record %s in Redis counts as lost: %s", self._key, reason)
            return version, None
        self._known = version, record
        return version, record

    def _signed(self, label: str, described: bytes, *more: str) -> bytes:
        signature = self._secret.sign(label, *self._about, *(one.encode() for one in more), described)
        return b"%b %b" % (signature.hex().encode(), described)

    def _verified(self, label: str, value: bytes, *more: str) -> bytes:
        """Returns the JSON of a value. Raises UnreadableRecordError if its signature is wrong."""
        signature, _, described = value.partition(b" ")
        try:
            code = bytes.fromhex(signature.decode())
        except ValueError:
            code = b"?"
        if not self._secret.verify(code, label, *self._about, *(one.encode() for one in more), described):
            raise UnreadableRecordError("it is not signed with the cluster's secret, or was changed afterwards")
        return described


def pause_s(attempt: int) -> float:
    """Returns how long to wait after a conflict, at random, so that not all try again at once."""
    return random.uniform(0, min(_LONGEST_PAUSE_S, 0.002 * 2.0 ** min(attempt, 10)))

"""The planner's lease in Redis: of several planners of a cluster only the one that holds it plans.

It is a hash, `cpd:<cluster>:planner`:

    lease → "<expires_ms> <name of the planner>"
    plan  → "<signature> <the last plan as JSON>"

A script takes the lease only if nobody else has it; all times are those of Redis's own clock. The plan outlives its
planner by an hour, so that the next one knows the last changes. Its signature shows that a process with the cluster's
secret wrote it. Whoever can write to Redis can keep planners from planning, but not tell them what to do.
"""

from cpd.common.redis_client import Redis
from cpd.common.trust import ClusterSecret

KEEP_S = 3600.0
"""Time for which a plan outlives its planner, in seconds."""

_HOLD = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local expires_ms, holder = string.match(redis.call('HGET', KEYS[1], 'lease') or '', '^(%d+) (.*)$')
if holder and holder ~= ARGV[1] and tonumber(expires_ms) > now_ms then
  return holder
end
redis.call('HSET', KEYS[1], 'lease', string.format('%.0f %s', now_ms + tonumber(ARGV[2]), ARGV[1]))
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'plan', ARGV[3])
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""
"""Takes or renews the lease, and writes the plan if there is one; returns the holder instead if it is another one."""

_RELEASE = """
if string.match(redis.call('HGET', KEYS[1], 'lease') or '', '^%d+ (.*)$') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'lease')
end
"""

_READ = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local expires_ms = string.match(redis.call('HGET', KEYS[1], 'lease') or '', '^(%d+) ')
local live = expires_ms and tonumber(expires_ms) > now_ms
return {live and 1 or 0, redis.call('HGET', KEYS[1], 'plan') or ''}
"""


class PlannerLease:
    """The lease, as one planner sees it.

    Args:
        name: Of this planner; no other one has it.
        ttl_s: The lease ends if it is not renewed for this long, in seconds.
    """

    def __init__(self, redis: Redis, cluster: str, secret: ClusterSecret, name: str, ttl_s: float) -> None:
        self._redis = redis
        self._cluster = cluster
        self._secret = secret
        self._name = name
        self._ttl_s = ttl_s

    async def hold(self, plan: bytes = b"") -> str:
        """Takes or renews the lease, and writes a plan if it is not empty.

        Returns:
            Name of the planner that has the lease instead; empty if this one has it.

        Raises:
            RedisError, OSError: Redis does not answer.
        """
        value = self._secret.signed("plan", plan, self._cluster.encode()) if plan else b""
        arguments: list[str | int | bytes] = [self._name, int(self._ttl_s * 1000), value, int(KEEP_S * 1000)]
        holder: bytes | None = await self._redis.register_script(_HOLD)([_key(self._cluster)], arguments)
        return (holder or b"").decode(errors="backslashreplace")

    async def release(self) -> None:
        """Gives the lease back, if this planner has it.

        Raises:
            RedisError, OSError: Redis does not answer.
        """
        await self._redis.register_script(_RELEASE)([_key(self._cluster)], [self._name])


async def read_plan(redis: Redis, cluster: str, secret: ClusterSecret) -> tuple[bytes, bool]:
    """Returns the last plan, empty if there is none with the cluster's signature, and whether its planner is alive.

    Raises:
        RedisError, OSError: Redis does not answer.
    """
    live, value = await redis.register_script(_READ)([_key(cluster)])
    return secret.verified("plan", value, cluster.encode()) or b"", bool(live)


def _key(cluster: str) -> str:
    return f"cpd:{cluster}:planner"

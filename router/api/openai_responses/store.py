"""Responses that clients can continue, in Redis: `previous_response_id`.

    cpd:<cluster>:responses:<tenant>          sorted set of the ids, by the time at which they were stored
    cpd:<cluster>:responses:<tenant>:<id>     signature (32 bytes, none without a secret) and JSON: the response, and
                                              all items of its conversation

A response holds its whole conversation, so that it can be continued when earlier ones are gone. Each tenant has a limit
on their number and bytes; the oldest go first. The signature shows that a router stored it for this tenant, so whoever
can write to Redis can't put words into a conversation.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, cast

import orjson

from cpd.common.redis_client import Redis, RedisError
from cpd.common.trust import ClusterSecret
from router.api.openai_responses.documents import ResponseDocument
from router.errors import ApiError, invalid, unavailable

log = logging.getLogger(__name__)

MAX_RESPONSES = 1_000
MAX_BYTES = 64 << 20
"""Limits on the stored responses of a tenant."""

RETRY_S = 1.0

_ID = re.compile("resp_[0-9a-f]{48}")

_SIGNATURE_BYTES = 32

_PUT = """
local ids, prefix, id, ttl_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[4]
local most, most_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
redis.call('SET', prefix .. id, ARGV[3], 'PX', ttl_ms)
redis.call('ZADD', ids, time[1] * 1000000 + time[2], id)
redis.call('PEXPIRE', ids, ttl_ms)
local bytes = 0
for place, stored in ipairs(redis.call('ZREVRANGE', ids, 0, -1)) do
  local size = redis.call('STRLEN', prefix .. stored)
  bytes = bytes + size
  if size == 0 or place > most or bytes > most_bytes then
    redis.call('DEL', prefix .. stored)
    redis.call('ZREM', ids, stored)
  end
end
"""
"""Stores a response, and removes what has expired or is over the limits."""


class ResponseStore:
    """The stored responses of all tenants.

    Args:
        ttl_s: Time for which a response is kept, in seconds.
    """

    def __init__(self, redis: Redis, cluster: str, secret: ClusterSecret, ttl_s: float) -> None:
        self._redis = redis
        self._cluster = cluster
        self._secret = secret
        self._ttl_ms = int(ttl_s * 1e3)

    async def put(self, tenant: str, response: ResponseDocument, items: Sequence[Any]) -> None:
        """Stores a response. If Redis fails, the response is served all the same.

        Args:
            tenant: Name of the tenant that may read it.
            items: All items of the conversation, as JSON.
        """
        response_id, ids = response["id"], self._ids(tenant)
        data = orjson.dumps({"response": response, "items": items})
        value = self._signature(tenant, response_id, data) + data
        arguments: list[str | bytes | int] = [f"{ids}:", response_id, value, self._ttl_ms, MAX_RESPONSES, MAX_BYTES]
        try:
            await self._redis.register_script(_PUT)([ids], arguments)
        except (RedisError, OSError) as error:
            log.warning("the response %s could not be stored: %s", response_id, error)

    async def response(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Returns a stored response.

        Raises:
            ApiError: The tenant has none with this id (404), or Redis does not answer (503).
        """
        stored = await self._read(tenant, response_id)
        if stored is None:
            raise invalid(
                "response_id", f"There is no stored response '{response_id}'.", code="response_not_found", status=404
            )
        return cast("dict[str, Any]", stored["response"])

    async def items(self, tenant: str, response_id: str) -> list[Any]:
        """Returns the items of a stored response's conversation, its own included.

        Raises:
            ApiError: The tenant has none with this id (400), or Redis does not answer (503).
        """
        stored = await self._read(tenant, response_id)
        if stored is None:
            raise invalid(
                "previous_response_id",
                f"There is no stored response '{response_id}' that 'previous_response_id' could continue.",
                code="previous_response_not_found",
            )
        return cast("list[Any]", stored["items"])

    async def delete(self, tenant: str, response_id: str) -> None:
        """Removes a stored response.

        Raises:
            ApiError: As `response`.
        """
        await self.response(tenant, response_id)
        ids = self._ids(tenant)
        try:
            await self._redis.delete(f"{ids}:{response_id}")
            await self._redis.zrem(ids, response_id)
        except (RedisError, OSError):
            raise _unavailable() from None

    async def _read(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        if not _ID.fullmatch(response_id):
            return None
        try:
            value = cast("bytes | None", await self._redis.get(f"{self._ids(tenant)}:{response_id}"))
        except (RedisError, OSError):
            raise _unavailable() from None
        if value is None:
            return None
        signed = _SIGNATURE_BYTES if self._secret else 0
        signature, data = value[:signed], value[signed:]
        if not self._secret.verify(signature, "response", *self._signed(tenant, response_id, data)):
            log.warning("the stored response %s is ignored: it has no signature of this cluster", response_id)
            return None
        return cast("dict[str, Any]", orjson.loads(data))

    def _signature(self, tenant: str, response_id: str, data: bytes) -> bytes:
        return self._secret.sign("response", *self._signed(tenant, response_id, data))

    def _signed(self, tenant: str, response_id: str, data: bytes) -> tuple[bytes, ...]:
        return self._cluster.encode(), tenant.encode(), response_id.encode(), data

    def _ids(self, tenant: str) -> str:
        return f"cpd:{self._cluster}:responses:{tenant}"


def _unavailable() -> ApiError:
    return unavailable("Redis, which stores the responses, does not answer.", RETRY_S)

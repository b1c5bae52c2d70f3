"""How an operator asks `cpd up` for other numbers of processes: routers and the launcher exchange two values in Redis.

    cpd:<cluster>:launcher  what the launcher reports: the numbers, and what became of the last request
    cpd:<cluster>:scale     the last request, until it is carried out or REQUEST_S old

Each is a hash with one field, `value`, because a Redis user for the cluster need not be allowed more than leases need.
Both are signed with the cluster's secret. A request names the launch that it is for and has an id, and the launcher
takes each id once: whoever can only write to Redis can't make a request, or repeat one. Numbers are all that a request
can change; what is started was decided by whoever ran `cpd up`.
"""

from typing import Annotated, TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from cpd.common.redis_client import Redis
from cpd.common.trust import ClusterSecret

REPORT_S = 5.0
"""A launcher that has not reported for this long is gone, in seconds."""

REQUEST_S = 5.0
"""A request that the launcher has not taken within this time is void, in seconds."""

MAX_PROCESSES = 1024
"""Most processes of one kind that can be asked for."""

_WRITE = """
redis.call('HSET', KEYS[1], 'value', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

T = TypeVar("T")

_AtLeastOne = Annotated[int, Field(ge=1, le=MAX_PROCESSES)]


class ModelNumbers(TypedDict):
    """How many workers of a model there are, by the role with which they started.

    `model` is its name in `models:`, and empty in a cluster without that setting.
    """

    model: str
    combined: int
    prefill: int


class ScalingReport(TypedDict):
    """What the launcher says.

    Attributes:
        launch: Random name of this run of the launcher.
        models: Empty if the number of workers can't change, because they are simulated.
        routers: How many there are.
        changing: The cluster is being changed, by whomever.
        request: Id of the last request that the launcher has taken.
        step: The last step of that change, as a sentence.
        error: Why it failed; empty if it did not.
    """

    launch: str
    models: list[ModelNumbers]
    routers: int
    changing: bool
    request: str
    step: str
    error: str


class ScaleRequest(TypedDict):
    """Numbers that an operator wants; a kind that is None stays as it is. `model` as in ModelNumbers."""

    id: str
    launch: str
    model: str
    combined: _AtLeastOne | None
    prefill: Annotated[int, Field(ge=0, le=MAX_PROCESSES)] | None
    router: _AtLeastOne | None


_REPORT, _REQUEST = TypeAdapter(ScalingReport), TypeAdapter(ScaleRequest)


class ScalingMailbox:
    """The two values. All methods raise RedisError or OSError if Redis does not answer."""

    def __init__(self, redis: Redis, cluster: str, secret: ClusterSecret) -> None:
        self._redis = redis
        self._cluster = cluster
        self._secret = secret

    async def write_report(self, report: ScalingReport) -> None:
        """Reports, for REPORT_S."""
        await self._write("launcher", report, REPORT_S)

    async def read_report(self) -> ScalingReport | None:
        """Returns the launcher's report; None without a launcher, or if it is of a version with other fields."""
        return await self._read("launcher", _REPORT)

    async def write_request(self, request: ScaleRequest) -> None:
        """Leaves a request for the launcher, in place of any other."""
        await self._write("scale", request, REQUEST_S)

    async def read_request(self) -> ScaleRequest | None:
        """Returns the request that waits, if any."""
        return await self._read("scale", _REQUEST)

    async def remove_request(self) -> None:
        """Removes the request that waits, if any."""
        await self._redis.hdel(self._key("scale"), "value")

    def _key(self, name: str) -> str:
        return f"cpd:{self._cluster}:{name}"

    async def _write(self, name: str, value: ScalingReport | ScaleRequest, ttl_s: float) -> None:
        signed = self._secret.signed(name, orjson.dumps(value), self._cluster.encode())
        await self._redis.register_script(_WRITE)([self._key(name)], [signed, int(ttl_s * 1000)])

    async def _read(self, name: str, kind: TypeAdapter[T]) -> T | None:
        value = await self._redis.hget(self._key(name), "value")
        text = self._secret.verified(name, value, self._cluster.encode()) if isinstance(value, bytes) else None
        try:
            return kind.validate_json(text, strict=True) if text is not None else None
        except ValidationError:
            return None

"""What is used of redis-py, imported without its metrics, which nothing here asks for.

Where OpenTelemetry's SDK is installed, as it is for traces, redis-py imports the SDK's metrics with itself. That is a
third of the time of its import, in every process. There is no setting against it.
"""

import sys

_HIDDEN = ("opentelemetry", "opentelemetry.sdk")  # the SDK by itself, too: somebody may have imported it before
_known = {name: sys.modules[name] for name in _HIDDEN if name in sys.modules}
sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]  # importing them fails
try:
    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import NoPermissionError, RedisError
    from redis.retry import Retry as BlockingRetry
finally:
    for _name in _HIDDEN:
        del sys.modules[_name]
    sys.modules.update(_known)

__all__ = [
    "BlockingRedis",
    "BlockingRetry",
    "NoBackoff",
    "NoPermissionError",
    "Redis",
    "RedisConnectionError",
    "RedisError",
    "Retry",
]

"""What is used of redis-py, imported without its metrics, which nothing here asks for.

Where OpenTelemetry's SDK is installed, as it is for traces, redis-py imports the SDK's metrics with itself. That is a
third of the time of its import, in every process. There is no setting against it.
"""

import sys

_known = sys.modules.get("opentelemetry")
sys.modules["opentelemetry"] = None  # type: ignore[assignment]  # importing it fails
try:
    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError
    from redis.retry import Retry as BlockingRetry
finally:
    del sys.modules["opentelemetry"]
    if _known is not None:
        sys.modules["opentelemetry"] = _known

__all__ = [
    "BlockingRedis",
    "BlockingRetry",
    "NoBackoff",
    "Redis",
    "RedisConnectionError",
    "RedisError",
    "Retry",
]

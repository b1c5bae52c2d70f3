"""What is used of redis-py, imported without its metrics, which nothing here asks for.

Where OpenTelemetry's SDK is installed, as it is for traces, redis-py imports the SDK's metrics with itself. That is a
third of the time of its import, in every process. There is no setting against it.
"""

import sys

_METRICS = ("opentelemetry.metrics", "opentelemetry.sdk.metrics")

_known = {name: sys.modules.get(name) for name in _METRICS}
sys.modules.update(dict.fromkeys(_METRICS))  # type: ignore[arg-type]  # importing them fails
try:
    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError
    from redis.retry import Retry as BlockingRetry
finally:
    for _name, _module in _known.items():
        del sys.modules[_name]
        if _module is not None:
            sys.modules[_name] = _module

__all__ = [
    "BlockingRedis",
    "BlockingRetry",
    "NoBackoff",
    "Redis",
    "RedisConnectionError",
    "RedisError",
    "Retry",
]

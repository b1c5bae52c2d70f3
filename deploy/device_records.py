"""The records of devices that models share (`cpd/residency/record.py`), from the start of a cluster to its end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator

from cpd.common.errors import ConfigError
from cpd.common.redis_client import Redis, RedisError
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger


@contextlib.contextmanager
def device_records(
    redis_url: str, cluster: str, secret: ClusterSecret, memory_bytes: int, hosts: Callable[[], Collection[str]]
) -> Iterator[None]:
    """Makes the record of each machine, and removes them at the end, when no worker runs any more.

    Workers make the record of a machine that joins later.

    Args:
        memory_bytes: What the models of a machine share.
        hosts: Returns the names of all machines.

    Raises:
        ConfigError: Redis does not answer.
    """

    async def each(names: Collection[str], do: Callable[[Ledger], Awaitable[None]]) -> None:
        async with Redis.from_url(redis_url) as redis:
            for name in sorted(names):
                await do(Ledger(redis, cluster, secret, name))

    first = set(hosts())
    try:
        asyncio.run(each(first, lambda ledger: ledger.start(memory_bytes)))
    except (RedisError, OSError) as error:
        raise ConfigError(f"Redis does not answer: {error}") from None
    try:
        yield
    finally:
        with contextlib.suppress(RedisError, OSError):  # it ended first; the records end by themselves
            asyncio.run(each(first | set(hosts()), Ledger.remove))

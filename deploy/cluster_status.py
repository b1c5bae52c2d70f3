"""The state of the cluster, asked of its routers, for `cpd up` and other commands.

The admin key leaves this machine only towards routers that prove by their certificate that a signed lease is theirs.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx2
import orjson

from cpd.common.errors import ConfigError, CPDError
from cpd.common.membership import Member, members
from cpd.common.redis_client import Redis, RedisError
from cpd.common.trust import ClusterSecret, read_secret
from deploy.state import ClusterState
from router.operations.peer_routers import PeerRouters
from router.operations.status import ClusterStatus, views_in, with_peers

_TIMEOUT_S = 5.0


def read_cluster(state: ClusterState) -> dict[str, Any]:
    """Returns the document of `GET /cluster` of a running cluster.

    Raises:
        CPDError: No router answers, or one answers with an error.
    """
    if not state.redis_url:
        return ask_endpoint(state.url, state.admin_key)
    secret = read_secret(Path(state.secret_file))
    return _ask_routers(read_leases(state.redis_url, state.cluster, secret), state.admin_key)


def ask_endpoint(url: str, admin_key: str) -> dict[str, Any]:
    """Asks the HTTP endpoint, which must be on this machine, for `/cluster`.

    Raises:
        CPDError: It does not answer, or answers with an error.
    """
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:  # ignores http_proxy: the endpoint is within the cluster
        answer = httpx2.get(f"{url}/cluster", headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=False)
        answer.raise_for_status()
        cluster: dict[str, Any] = orjson.loads(answer.content)
        return cluster
    except httpx2.HTTPStatusError as error:
        response = error.response
        raise CPDError(f"{url}/cluster answers {response.status_code} {response.reason_phrase}") from None
    except (httpx2.HTTPError, ValueError) as error:
        raise CPDError(f"{url} does not answer: {error}. If the cluster has just been started, try again") from None


def _ask_routers(leases: Sequence[Member], admin_key: str) -> dict[str, Any]:
    """Asks the admin ports of all routers, and merges the answers."""
    routers = [member for member in leases if member.kind == "router"]
    if not routers:
        raise CPDError("no router runs. If the cluster has just been started, try again")
    question = PeerRouters("", lambda: routers).ask("/cluster", f"Bearer {admin_key}".encode())
    answers = asyncio.run(question)
    usable = [answer for answer in answers if answer.ok]
    if not usable:
        reasons = "; ".join(f"{answer.router_id}: {answer.error}" for answer in answers)
        raise CPDError(f"no router answers: {reasons}")
    own: ClusterStatus = orjson.loads(usable[0].body)
    others = [answer for answer in answers if answer is not usable[0]]
    return cast(dict[str, Any], with_peers(own, usable[0].router_id, *views_in(others)))


def read_leases(redis_url: str, cluster: str, secret: ClusterSecret) -> list[Member]:
    """Returns all members with a lease.

    Raises:
        ConfigError: Redis does not answer.
    """

    async def read() -> list[Member]:
        async with Redis.from_url(redis_url) as redis:
            return await members(redis, cluster, secret)

    try:
        return asyncio.run(read())
    except (RedisError, OSError, ValueError) as error:
        address = redis_url.rpartition("@")[2]  # without a password
        raise ConfigError(f"Redis at {address} does not answer: {error}") from None


def has_workers(state: ClusterState, pids: Mapping[str, int], routers: Collection[str]) -> bool:
    """True if all these routers can place requests on all these workers (process id by name)."""
    try:
        workers = read_cluster(state)["workers"]
    except CPDError:
        return False
    ready = {worker["id"]: worker["pid"] for worker in workers if _is_ready_at(worker, routers)}
    return pids.items() <= ready.items()


def _is_ready_at(worker: dict[str, Any], routers: Collection[str]) -> bool:
    seen = worker["routers"]
    return all(router in seen and seen[router]["state"] == "ready" for router in routers)

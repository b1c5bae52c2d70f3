"""The state of the cluster and the placements of a request, for operators.

The public port, which several routers may share, answers for all routers: it asks the others' admin ports. An admin
port answers only for its own router. If a router does not answer, the response names it and has the rest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from typing_extensions import TypedDict

from cpd.common.tls import base_url
from router.dispatch.roster import Roster
from router.errors import invalid
from router.operations.peer_routers import PeerAnswer, PeerRouters
from router.operations.status import ClusterStatus, Served, cluster_status, views_in, with_peers
from router.usage import TenantUsage, unused


class RequestPlacements(TypedDict):
    """The placements of a request: one per prompt and attempt, oldest first.

    `missing` has the routers that did not answer, with the reasons.
    """

    id: str
    placements: list[dict[str, Any]]
    missing: dict[str, str]


class ClusterUsage(TypedDict):
    """What each tenant has used since the routers started, by its name.

    `since` has the starts of the routers that answered, in seconds since 1970; `missing` has the others, with the
    reasons.
    """

    tenants: dict[str, TenantUsage]
    since: dict[str, float]
    missing: dict[str, str]


class ScrapeTargets(TypedDict):
    """A group of targets for Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Overview:
    """Answers for this router and its peers.

    Args:
        peers: The other routers to ask; None to answer for this router alone.
        usage: What each tenant has used at this router.
        cluster: The cluster's name.
        ready: Returns whether this router is ready.

    Attributes:
        router_id: This router's name.
    """

    def __init__(
        self,
        roster: Roster,
        models: Sequence[Served],
        peers: PeerRouters | None,
        usage: Mapping[str, TenantUsage],
        *,
        cluster: str,
        ready: Callable[[], bool],
    ) -> None:
        self.router_id = roster.router_id
        self._roster = roster
        self._models = models
        self._peers = peers
        self._usage = usage
        self._since = time.time()
        self._cluster = cluster
        self._ready = ready

    async def cluster(self, authorization: bytes) -> ClusterStatus:
        """Returns the state of the cluster. `routers[].error` says why a router did not answer."""
        own = await self.own()
        return with_peers(own, self.router_id, *await self.peers(authorization))

    async def own(self) -> ClusterStatus:
        """Returns the cluster as this router sees it."""
        return await cluster_status(self._roster, self._models, self._cluster, ready=self._ready())

    async def peers(self, authorization: bytes) -> tuple[dict[str, ClusterStatus], dict[str, str]]:
        """Returns the cluster as the other routers see it, and why the rest did not answer, by router."""
        return views_in(await self._ask("/cluster", authorization))

    async def placements(
        self, tenant: str, authorization: bytes, request_id: str, *, internals: bool
    ) -> RequestPlacements:
        """Returns the placements of a tenant's request.

        Args:
            internals: See `Decision.describe`.

        Raises:
            ApiError: No router that answered knows the request (404).
        """
        own_id = self.router_id
        placements = [
            {"router": own_id, **record.describe(internals=internals)}
            for one in self._models
            for record in one.decisions.find(tenant, request_id)
        ]
        missing: dict[str, str] = {}
        segment = quote(request_id, safe="").replace(".", "%2E")  # as it is, `../usage` would be another route
        for answer in await self._ask(f"/requests/{segment}", authorization):
            if answer.ok:
                placements += orjson.loads(answer.body)["placements"]
            elif answer.status != 404:
                missing[answer.router_id] = answer.error
        if not placements:
            message = f"You have no recent request {request_id!r}."
            message += "".join(f" Router {router_id} did not answer: {error}." for router_id, error in missing.items())
            raise invalid(None, message, code="request_not_found", status=404)
        return {"id": request_id, "placements": placements, "missing": missing}

    async def usage(self, authorization: bytes) -> ClusterUsage:
        """Returns what each tenant has used."""
        total: ClusterUsage = {"tenants": {}, "since": {self.router_id: self._since}, "missing": {}}
        _add_usage(total["tenants"], self._usage)
        for answer in await self._ask("/usage", authorization):
            if not answer.ok:
                total["missing"][answer.router_id] = answer.error
                continue
            other: ClusterUsage = orjson.loads(answer.body)
            total["since"].update(other["since"])
            _add_usage(total["tenants"], other["tenants"])
        return total

    def scrape_targets(self) -> list[ScrapeTargets]:
        """Returns the admin ports of all routers, with the scheme that Prometheus must use."""
        targets: list[ScrapeTargets] = []
        for member in self._roster.routers:
            scheme, _, place = base_url(member.admin)[0].partition("://")
            targets.append({"targets": [place], "labels": {"router": member.id, "__scheme__": scheme}})
        return targets

    async def _ask(self, path: str, authorization: bytes) -> Sequence[PeerAnswer]:
        return await self._peers.ask(path, authorization) if self._peers is not None else ()


def _add_usage(totals: dict[str, TenantUsage], tenants: Mapping[str, TenantUsage]) -> None:
    for tenant, used in tenants.items():
        total = totals.setdefault(tenant, unused())
        total["requests"] += used["requests"]
        total["prompt_tokens"] += used["prompt_tokens"]
        total["cached_tokens"] += used["cached_tokens"]
        total["completion_tokens"] += used["completion_tokens"]

"""What operators ask of the routers: metrics, the cluster's state, and where a request went.

The public port, which several routers may share, answers for all of them: it asks the others' admin ports. An admin
port answers for its router alone. Where a router does not answer, the rest is told, and which one is missing.
"""

import asyncio
from typing import Any

import orjson

from router.errors import invalid
from router.exposition import merged
from router.service import Service
from router.siblings import Answer, Siblings
from router.status import cluster_status, with_siblings
from router.tenants import Tenant


class Overview:
    """Answers for this router and its siblings.

    Args:
        siblings: Who else is asked; None: nobody.
    """

    def __init__(self, service: Service, siblings: Siblings | None) -> None:
        self._service = service
        self._siblings = siblings

    async def metrics(self, tenant: Tenant, authorization: bytes) -> str:
        """Prometheus' text format; for several routers `cpd_router_up` says which of them are in it.

        Raises:
            ApiError: The tenant may not see it (403).
        """
        tenant.check_admin()
        # in a thread: with a thousand workers it takes 0.2 s
        own = Answer(self._service.workers.router_id, 200, await asyncio.to_thread(self._service.metrics.text))
        if self._siblings is None:
            return own.body.decode()
        answers = [own, *await self._ask("/metrics", authorization)]
        up = ["# HELP cpd_router_up 1 for a router that these metrics include.", "# TYPE cpd_router_up gauge"]
        up += [f'cpd_router_up{{router="{answer.router_id}"}} {int(answer.ok)}' for answer in answers]
        texts = ["\n".join(up), *(answer.body.decode() for answer in answers if answer.ok)]
        return await asyncio.to_thread(merged, texts)

    async def cluster(self, tenant: Tenant, authorization: bytes) -> dict[str, Any]:
        """The cluster's state; `routers[].error` says who did not answer, and why.

        Raises:
            ApiError: The tenant may not see it (403).
        """
        tenant.check_admin()
        own = cluster_status(self._service)
        answers = await self._ask("/cluster", authorization)
        return with_siblings(own, self._service.workers.router_id, answers)

    async def placements(self, tenant: Tenant, authorization: bytes, request_id: str) -> dict[str, Any]:
        """Where a request went; `missing` has the routers that did not answer, with the reasons.

        Raises:
            ApiError: No router that answered knows the request (404).
        """
        own_id = self._service.workers.router_id
        records = self._service.dispatcher.history.find(tenant.name, request_id)
        placements = [{"router": own_id, **record.describe()} for record in records]
        missing: dict[str, str] = {}
        for answer in await self._ask(f"/requests/{request_id}", authorization):
            if answer.ok:
                placements += orjson.loads(answer.body)["placements"]
            elif answer.status != 404:
                missing[answer.router_id] = answer.error
        if not placements:
            message = f"Nothing is known of a recent request {request_id!r} of yours."
            message += "".join(f" Router {router_id} was not heard: {error}." for router_id, error in missing.items())
            raise invalid(None, message, code="request_not_found", status=404)
        return {"id": request_id, "placements": placements, "missing": missing}

    async def _ask(self, path: str, authorization: bytes) -> list[Answer]:
        return await self._siblings.ask(path, authorization) if self._siblings is not None else []

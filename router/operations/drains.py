"""Drains a worker or router of the cluster for an operator, as `cpd drain` does."""

import asyncio
from collections.abc import Sequence

from cpd.common.errors import CPDError
from cpd.common.lifecycle import Lifecycle
from cpd.common.process import EXIT_DRAINED
from router.dispatch.roster import Roster
from router.dispatch.workers import Workers
from router.errors import invalid, one_line, unavailable
from router.operations.peer_routers import PeerRouters

RETRY_S = 1.0


class Drains:
    """Finds the process and tells it to drain.

    Args:
        models: The workers of each model.
        lifecycle: That of this router.
        admin_key: The cluster's admin key, for workers.
    """

    def __init__(
        self, roster: Roster, models: Sequence[Workers], peers: PeerRouters, lifecycle: Lifecycle, admin_key: str
    ) -> None:
        self._roster = roster
        self._models = models
        self._peers = peers
        self._lifecycle = lifecycle
        self._admin_key = admin_key

    async def start(self, name: str, authorization: bytes) -> None:
        """Lets the worker or router with this name drain, within its own `--drain-s`. It is not started again.

        Args:
            authorization: The operator's, for another router.

        Raises:
            ApiError: There is no such process (404), or it does not answer (503).
        """
        for session in (session for workers in self._models for session in workers.sessions):
            if session.id == name:
                await self._drain_worker(name, session.member.address)
                return
        if all(member.id != name for member in self._roster.routers):
            message = f"This cluster has no worker or router {one_line(name)!r}."
            raise invalid("name", message, code="process_not_found", status=404)
        if name == self._roster.router_id:
            self._lifecycle.drain("asked to", EXIT_DRAINED)
            return
        answer = await self._peers.drain(name, authorization)
        if not answer.ok:
            raise unavailable(f"Router {name} does not answer: {answer.error}.", RETRY_S)

    async def _drain_worker(self, name: str, address: str) -> None:
        from worker.admin_calls import drain_worker  # gRPC, which a router needs for nothing else

        try:
            await asyncio.to_thread(drain_worker, name, address, self._admin_key, None)
        except CPDError as error:
            raise unavailable(one_line(f"{error}."), RETRY_S) from None

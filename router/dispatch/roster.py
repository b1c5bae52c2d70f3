"""The processes of the cluster, as their leases in Redis list them: routers, and the workers of each model.

While Redis is down, the router keeps the processes it knows.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cpd.common.membership import Member, members
from cpd.common.planner_lease import read_plan
from cpd.common.redis_client import Redis, RedisError
from cpd.common.scaling import ScalingMailbox, ScalingReport
from cpd.common.trust import ClusterSecret
from cpd.planner.report import PlanReport, parse_report
from router.dispatch.worker_session import Listener
from router.dispatch.workers import ROLES, Workers
from router.errors import describe

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval at which Redis is asked for the processes, in seconds."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The workers of a model, and who listens to their sessions."""

    workers: Workers
    listener: Listener


class Roster:
    """Follows the cluster's membership.

    Args:
        router_id: This router's name.
        secret: The cluster's secret.

    Attributes:
        router_id: See above.
        routers: The live routers, this one included.
        polled: Set after the first attempt to ask Redis, even if it failed.
        redis_error: Reason why Redis does not answer; empty if it does.
        plan: The planner's last decision; None if there was no planner within the last hour.
        plans: Whether a planner is alive.
        scaling: What the launcher reports; None without one.
    """

    def __init__(self, router_id: str, secret: ClusterSecret) -> None:
        self.router_id = router_id
        self.routers: list[Member] = []
        self.polled = asyncio.Event()
        self.redis_error = ""
        self.plan: PlanReport | None = None
        self.plans = False
        self.scaling: ScalingReport | None = None
        self._secret = secret
        self._unreadable: set[str] = set()  # leases

    async def run(self, redis: Redis, cluster: str, models: Sequence[Followed], ended: asyncio.Event) -> None:
        """Keeps the workers of all models up to date until `ended` is set; then closes all sessions."""
        # an event, because the Redis client's own timeouts can swallow a cancellation
        sweepers = [asyncio.create_task(one.workers.sweep(), name="sweep-index") for one in models]
        try:
            while not ended.is_set():
                await self._poll(redis, cluster, models)
                self.polled.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await ended.wait()
        finally:
            for sweeper in sweepers:
                sweeper.cancel()
            for one in models:
                await one.workers.close(one.listener)

    async def _poll(self, redis: Redis, cluster: str, models: Sequence[Followed]) -> None:
        try:
            listed = await members(redis, cluster, self._secret, self._unreadable)
            plan, self.plans = await read_plan(redis, cluster, self._secret)
            self.scaling = await ScalingMailbox(redis, cluster, self._secret).read_report()
        except (RedisError, OSError, TimeoutError) as error:
            if not self.redis_error:
                log.warning("Redis does not answer; keeping the known workers: %s", describe(error))
            self.redis_error = describe(error)
            return
        if self.redis_error:
            log.info("Redis answers again")
        self.redis_error = ""
        self.plan = parse_report(plan)
        self.routers = sorted((member for member in listed if member.kind == "router"), key=lambda one: one.id)
        by_name: dict[str, dict[str, Member]] = {one.workers.model_name: {} for one in models}
        first = models[0].workers.model_name
        for member in listed:
            if member.kind in ROLES:  # the first model takes, and refuses, those of unknown ones
                by_name.get(member.model, by_name[first])[member.id] = member
        for one in models:
            await one.workers.follow(by_name[one.workers.model_name], one.listener)

"""Asks `cpd up` for other numbers of workers and routers for an operator, as `cpd scale` does."""

import asyncio
import time
from secrets import token_hex

from cpd.common.redis_client import Redis, RedisError
from cpd.common.scaling import REQUEST_S, ScaleRequest, ScalingMailbox
from cpd.common.trust import ClusterSecret
from router.errors import describe, invalid, unavailable
from router.operations.drains import RETRY_S

POLL_S = 0.1
"""Interval at which the router looks whether the launcher has taken a request, in seconds."""


class Scaling:
    """Leaves requests for the launcher, which may run on another machine, in Redis."""

    def __init__(self, redis: Redis, cluster: str, secret: ClusterSecret) -> None:
        self._mailbox = ScalingMailbox(redis, cluster, secret)

    async def ask(self, model: str, combined: int | None, prefill: int | None, routers: int | None) -> None:
        """Asks for numbers of processes; None leaves a kind as it is. Returns when the launcher has begun.

        Args:
            model: Name of the model whose workers are meant, if `models:` names several; else empty.

        Raises:
            ApiError: No number is given (400), there is no launcher or the cluster is being changed (409), or nobody
                answers (503).
        """
        if combined is prefill is routers is None:
            raise invalid(None, "Say how many there shall be: 'combined', 'prefill' or 'routers'.")
        try:
            report = await self._mailbox.read_report()
            if report is None:
                message = "No `cpd up` runs for this cluster: change the numbers where its processes are started."
                raise invalid(None, message, code="no_launcher", status=409)
            if report["changing"]:
                message = "The cluster is being changed already; try again when that has ended."
                raise invalid(None, message, code="cluster_changes", status=409)
            request: ScaleRequest = {
                "id": token_hex(16),
                "launch": report["launch"],
                "model": model,
                "combined": combined,
                "prefill": prefill,
                "router": routers,
            }
            await self._mailbox.write_request(request)
            deadline = time.monotonic() + REQUEST_S  # no asyncio.timeout: the Redis client can swallow its cancellation
            while report is None or report["request"] != request["id"]:
                if time.monotonic() > deadline:
                    raise unavailable("`cpd up` does not answer, or follows another request.", RETRY_S)
                await asyncio.sleep(POLL_S)
                report = await self._mailbox.read_report()
        except (RedisError, OSError) as error:
            raise unavailable(f"Redis does not answer: {describe(error)}.", RETRY_S) from None

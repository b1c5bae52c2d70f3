"""A line in the log every PERIOD_S that says what the router does, while it does something."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from cpd.common.logs import fields
from router.activity import Activity
from router.dispatch.workers import Workers

log = logging.getLogger("router.summary")

PERIOD_S = 10.0
"""Interval of the lines, in seconds."""


async def summarize(activity: Activity, models: Sequence[Workers], ended: asyncio.Event) -> None:
    """Writes the lines, about the workers of all models, until `ended` is set."""
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await ended.wait()
        live = [session for workers in models for session in workers.sessions if session.live]
        running, waiting = sum(one.load.running for one in live), sum(one.load.waiting for one in live)
        figures = activity.take(PERIOD_S)
        if figures or running or waiting:
            log.info(
                "last %g s", PERIOD_S, extra=fields(**figures, running=running, waiting=waiting, workers=len(live))
            )

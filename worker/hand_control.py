"""Lets people decide when a worker's model sleeps and wakes. Nothing else does."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from cpd.common.errors import CPDError
from cpd.residency.snapshot import SleepSettings
from cpd.rpc import cpd_pb2 as pb
from worker.resident import ModelState, Resident

log = logging.getLogger(__name__)

_POLL_S = 0.02


class HandControl:
    """Implements `worker.resident.Residency`. Calls that don't fit the model's state do nothing.

    Args:
        changed: Called when the report has changed.
        settings: How long running requests have to end before the model sleeps.
    """

    def __init__(self, resident: Resident, changed: Callable[[], None], settings: SleepSettings | None = None) -> None:
        self._resident = resident
        self._changed = changed
        self._drain_s = (settings or SleepSettings()).drain_timeout_s
        self._pinned = False
        self._task: asyncio.Task[None] | None = None

    def report(self) -> pb.Residency:
        """See `Residency`."""
        return pb.Residency(state=self._resident.state.to_wire(), pinned=self._pinned)

    def request_arrived(self) -> None:
        """Does nothing: the request waits until a person wakes the model."""

    def sleep(self) -> None:
        """See `Residency`."""
        if self._resident.state is ModelState.SERVING:
            self._resident.drain()
            self._begin(self._sleep_when_drained())

    def wake(self) -> None:
        """See `Residency`."""
        if self._resident.state is ModelState.ASLEEP:
            self._begin(self._wake())

    def pin(self, pinned: bool) -> None:
        """See `Residency`."""
        self._pinned = pinned
        self._changed()

    async def close(self) -> None:
        """See `Residency`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(change, name="residency")

    async def _sleep_when_drained(self) -> None:
        end = time.monotonic() + self._drain_s
        while self._resident.facts(now := time.monotonic()).running and now < end:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        try:
            await self._resident.sleep()
        except CPDError as error:
            log.error("the model can't sleep: %s", error)

    async def _wake(self) -> None:
        try:
            await self._resident.wake()
        except CPDError as error:
            log.error("the model can't wake: %s", error)

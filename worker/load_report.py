"""Sends load reports to the routers.

Most fields come from the engine (`load_from_stats`), the others from each `add_load` that `WorkerService.add_load`
calls: requests of `decode_worker/service.py` and `prefill_worker/service.py`, pages sent of `page_sender.py`.
"""

import asyncio
from collections.abc import Callable, Hashable

from cpd.rpc import cpd_pb2 as pb
from engine.types import EngineStats

INTERVAL_S = 0.1
"""Shortest time between two reports, unless the worker becomes busy or idle, or its state, role or model's state
changes."""

HEARTBEAT_S = 1.0
"""Longest time between two reports. An unchanged report shows that this process runs."""


def load_from_stats(stats: EngineStats, state: pb.State.ValueType) -> pb.Load:
    """Returns the engine's part of a load report."""
    return pb.Load(
        state=state,
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        free_pages=stats.pages.free,
        cached_pages=stats.pages.cached,
        used_pages=stats.pages.used,
        reserved_pages=stats.pages.reserved,
        quarantined_pages=stats.pages.quarantined,
        preemptions=stats.preemptions,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        cached_tokens=stats.cached_tokens,
        decodes=stats.decodes,
        decode_context=stats.decode_context,
        prefill_ms=stats.prefill_ms,
        overdue_ms=stats.overdue_ms,
        step_ms=stats.step_ms,
        slowdown=stats.slowdown,
        queued_tokens=stats.queued_tokens,
        host_pages=stats.host.pages,
        host_offloaded_pages=stats.host.offloaded,
        host_blocks=stats.host.blocks,
        awaiting_first_token=stats.awaiting_first_token,
    )


class LoadReporter:
    """Publishes the load when it has changed, at a bounded rate, and every HEARTBEAT_S otherwise.

    Args:
        current: Returns the current report.
        urgent: Returns what routers should know at once if it changes. Cheap: asked after every step.
        publish: Sends a report to all routers.
    """

    def __init__(
        self,
        current: Callable[[], pb.Load],
        urgent: Callable[[], Hashable],
        publish: Callable[[pb.Load], None],
    ) -> None:
        self._current = current
        self._urgent = urgent
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._last = pb.Load()
        self._last_urgent: Hashable = None
        self._due: asyncio.TimerHandle | None = None
        self._beat = self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    def changed(self) -> None:
        """Publishes the report if it has changed: now, or when INTERVAL_S has passed since the last one."""
        if self._due is not None and self._urgent() == self._last_urgent:
            return
        load = self._current()
        if load != self._last:
            self._send(load)

    def close(self) -> None:
        """Stops publishing."""
        self._beat.cancel()
        if self._due is not None:
            self._due.cancel()

    def _send(self, load: pb.Load) -> None:
        if self._due is not None:
            self._due.cancel()
        self._last, self._last_urgent = load, self._urgent()
        self._due = self._loop.call_later(INTERVAL_S, self._interval_passed)
        self._publish(load)

    def _interval_passed(self) -> None:
        self._due = None
        self.changed()

    def _heartbeat(self) -> None:
        self._beat = self._loop.call_later(HEARTBEAT_S, self._heartbeat)
        if self._due is None:
            self._send(self._current())

"""Notices a hanging engine: a device that never ends a step, or a driver that never returns."""

import asyncio
from collections.abc import Callable

HANG_S = 300.0
"""Far longer than any step, or a layer of one on a CPU, takes."""

_TICKS = 60


async def hang(running: Callable[[], int], progress: Callable[[], float]) -> None:
    """Returns when a pass of the engine, or a chunk on its prefill lane, has made no progress for `HANG_S`.

    It counts looks, not seconds, so that a time in which this process itself was stopped is no hang.

    Args:
        running: Returns the number of the pass or chunk that is running; 0 if none is.
        progress: Returns a value that changes while it makes progress.
    """
    before, looks = (0, 0.0), 0
    while looks < _TICKS:
        await asyncio.sleep(HANG_S / _TICKS)
        now = running(), progress()
        looks = looks + 1 if now[0] and now == before else 0
        before = now

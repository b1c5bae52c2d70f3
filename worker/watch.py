"""Whether the engine hangs: a device that never ends what it was given, or a driver that never returns."""

import asyncio
from collections.abc import Callable

HANG_S = 300.0
"""Far more than a step takes anywhere, or a layer of one on a CPU."""

_TICKS = 60


async def hang(under_way: Callable[[], int], progress: Callable[[], float]) -> None:
    """Returns when one thing has got nowhere for `HANG_S`: a pass of the engine, or a chunk on its prefill lane.

    Looks are counted, not seconds: time in which this process itself stands still must not look like a hang.

    Args:
        under_way: The number of the one that is under way; 0: none is.
        progress: Changes while it gets on.
    """
    before, looks = (0, 0.0), 0
    while looks < _TICKS:
        await asyncio.sleep(HANG_S / _TICKS)
        now = under_way(), progress()
        looks = looks + 1 if now[0] and now == before else 0
        before = now

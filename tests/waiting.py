"""Waiting for conditions, with a deadline."""

import asyncio
from collections.abc import Callable

DEADLINE_S = 60.0


async def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Returns when `condition` holds.

    Raises:
        TimeoutError: It did not in time.
    """
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - for conditions that tell nobody
            await asyncio.sleep(0.005)

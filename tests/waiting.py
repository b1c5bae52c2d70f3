"""Waiting for conditions, with a deadline."""

import asyncio
from collections.abc import Callable

DEADLINE_S = 60.0


async def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Waits until `condition` is true.

    Raises:
        TimeoutError: It is still false after `deadline_s`.
    """
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - conditions without an event
            await asyncio.sleep(0.005)

"""Signals from a transport's thread to coroutines."""

import asyncio


class Latch:
    """An event that any thread may set, for coroutines of one event loop. Once set it stays set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            if not self._loop.is_closed():  # nobody waits on a closed loop
                raise

    async def wait(self) -> None:
        await self._event.wait()

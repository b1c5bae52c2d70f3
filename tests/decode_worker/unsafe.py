"""Landings that may still be written to."""

import asyncio
from collections.abc import Sequence

from kvtransfer.base import Landing
from tests.worker.cluster import Running


class Unsafe:
    """Makes a worker's landings unsafe until `gone` is set."""

    def __init__(self, worker: Running) -> None:
        self.gone = asyncio.Event()
        self._transport = worker.worker._transport
        self._expect = self._transport.expect
        self._transport.expect = self._unsafe  # type: ignore[method-assign, assignment]

    def _unsafe(self, reservation: int, generation: int, pages: Sequence[int]) -> Landing:
        return UnsafeLanding(self._expect(reservation, generation, pages), self.gone)


class UnsafeLanding:
    """A landing into which a write may still be under way until `gone` is set, unless it is complete."""

    def __init__(self, landing: Landing, gone: asyncio.Event) -> None:
        self._landing = landing
        self._gone = gone

    async def done(self) -> None:
        await self._landing.done()

    def revoke(self) -> bool:
        self._landing.revoke()
        return self._gone.is_set()

    async def peer_gone(self) -> None:
        await self._gone.wait()

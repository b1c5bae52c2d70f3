"""Reserves pages for landings, first come, first served.

    asked ──▶ blocks in host memory are loaded, if that is quicker ──▶ waits for free pages ──▶ reserved

A small landing never overtakes a large one, which could otherwise starve. A landing has no place in the queue while its
blocks are being loaded: it delays no other landing and takes no pages from the queue. Blocks that are damaged in host
memory, or for which there are too few pages, are not loaded; the other worker sends them like the rest.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from engine.engine import Engine
from engine.types import Request, Reservation
from worker.async_engine import AsyncEngine

Reserved = Reservation | bool
"""A reservation; False if there is none."""


class LandingRequest:
    """A request for pages.

    Attributes:
        reserved: The reservation; False if it was withdrawn, or refused by `reserve_now`.
    """

    reserved: asyncio.Future[Reserved]

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.request = request
        self.queued = False
        self.withdrawn = False
        self._engine = engine

    async def withdraw(self) -> Reservation | None:
        """Gives the request up; returns the reservation if it was already made."""
        self.withdrawn = True
        self._engine.nudge()
        try:
            result = await self.reserved
        except ValueError:
            return None
        return result if isinstance(result, Reservation) else None


class LandingQueue:
    """The landing requests of a worker, in the order of asking."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: deque[LandingRequest] = deque()  # only the engine thread uses it

    def reserve(self, request: Request) -> LandingRequest:
        """Reserves pages for a whole prompt as soon as the engine can spare them."""
        landing = LandingRequest(self._engine, request)
        landing.reserved = self._after_load(landing, request.block_hashes, lambda engine: self._try(engine, landing))
        return landing

    def reserve_now(self, request: Request, blocks: int) -> LandingRequest:
        """Reserves pages for the first blocks of a prompt, without waiting in the queue.

        There is no reservation if pages can't be spared now, or if all of the blocks are cached.
        """
        landing = LandingRequest(self._engine, request)

        def reserve(engine: Engine) -> Reserved:
            refused = landing.withdrawn or self._waiting
            return (None if refused else engine.landings.reserve(request, blocks)) or False

        landing.reserved = self._after_load(landing, request.block_hashes[:blocks], reserve)
        return landing

    def _after_load(
        self, landing: LandingRequest, hashes: Sequence[bytes], reserve: Callable[[Engine], Reserved | None]
    ) -> asyncio.Future[Reserved]:
        """Loads blocks from host memory, then polls `reserve`."""

        def load(engine: Engine) -> None:
            if not self._waiting:
                engine.load(hashes)

        def attempt(engine: Engine) -> Reserved | None:
            if not (landing.queued or landing.withdrawn) and engine.loading(hashes):
                return None
            return reserve(engine)

        self._engine.post(load)
        return self._engine.poll(attempt)

    def _try(self, engine: Engine, landing: LandingRequest) -> Reserved | None:
        if not landing.queued:
            landing.queued = True
            self._waiting.append(landing)
        if landing.withdrawn:
            self._leave(landing)
            return False
        if self._waiting[0] is not landing:
            return None
        try:
            reservation = engine.landings.reserve(landing.request)
        except ValueError:
            self._leave(landing)
            raise
        if reservation is not None:
            self._leave(landing)
        return reservation

    def _leave(self, landing: LandingRequest) -> None:
        self._waiting.remove(landing)
        if self._waiting:
            self._engine.nudge()  # the next one may be first now

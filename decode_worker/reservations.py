"""Who gets the next pages that become free: fills that are ready, first come, first served.

A small landing never overtakes a large one, so that the large one is not starved.
"""

import asyncio
from collections import deque

from engine.engine import Engine
from engine.types import Request, Reservation
from worker.engine_bridge import EngineBridge


class Wanted:
    """One fill's wish for pages.

    Attributes:
        withdrawn: Set it (and nudge the engine) when the pages are not wanted any more.
        queued: For the queue.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.withdrawn = False
        self.queued = False


class ReservationQueue:
    """Reserves pages in the order of asking, as soon as the engine can spare them."""

    def __init__(self, engine: EngineBridge) -> None:
        self._engine = engine
        self._waiting: deque[Wanted] = deque()  # the engine thread's

    def get(self, wanted: Wanted) -> asyncio.Future[Reservation | bool]:
        """The reservation, or False when the wish was withdrawn before it came true."""
        return self._engine.poll(lambda engine: self._attempt(engine, wanted))

    def get_now(self, request: Request, blocks: int) -> asyncio.Future[Reservation | bool]:
        """For the first blocks of a prompt; False where pages can't be spared now, or all of the blocks are cached."""

        def reserve(engine: Engine) -> Reservation | bool:
            return (None if self._waiting else engine.reserve(request, blocks)) or False

        return self._engine.call(reserve)

    def _attempt(self, engine: Engine, wanted: Wanted) -> Reservation | bool | None:
        if not wanted.queued:
            wanted.queued = True
            self._waiting.append(wanted)
        if wanted.withdrawn:
            self._waiting.remove(wanted)
            return False
        if self._waiting[0] is not wanted:
            return None
        try:
            reservation = engine.reserve(wanted.request)
        except ValueError:
            self._waiting.remove(wanted)
            raise
        if reservation is not None:
            self._waiting.popleft()
        return reservation

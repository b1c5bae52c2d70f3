"""Who gets the next pages that become free: fills that are ready, first come, first served.

    asked ──▶ what host memory keeps of the blocks comes back, if that is worth it ──▶ waits for its turn ──▶ reserved

A small landing never overtakes a large one, so that the large one is not starved. One whose blocks are coming back does
not have its place yet: it keeps nobody waiting, and takes no pages that others wait for. What is damaged, or what there
are too few pages for, does not come back, and is moved like the rest.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

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
        return self._when_back(wanted, wanted.request.block_hashes, lambda engine: self._attempt(engine, wanted))

    def get_now(self, wanted: Wanted, blocks: int) -> asyncio.Future[Reservation | bool]:
        """For the first blocks of a prompt, without waiting for a turn.

        False where pages can't be spared now, all of the blocks are cached, or the wish was withdrawn.
        """

        def reserve(engine: Engine) -> Reservation | bool:
            refused = wanted.withdrawn or self._waiting
            return (None if refused else engine.reserve(wanted.request, blocks)) or False

        return self._when_back(wanted, wanted.request.block_hashes[:blocks], reserve)

    def _when_back(
        self, wanted: Wanted, hashes: Sequence[bytes], reserve: Callable[[Engine], Reservation | bool | None]
    ) -> asyncio.Future[Reservation | bool]:
        """Has blocks come back from host memory, then polls `reserve`."""

        def bring_back(engine: Engine) -> None:
            if not self._waiting:
                engine.load(hashes)

        def attempt(engine: Engine) -> Reservation | bool | None:
            if engine.loading(hashes) and not (wanted.queued or wanted.withdrawn):
                return None
            return reserve(engine)

        self._engine.post(bring_back)
        return self._engine.poll(attempt)

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

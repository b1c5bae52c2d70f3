"""Whose turn it is: a bounded first-in first-out queue of fills.

    WAITING ──granted──▶ READY ──started──▶ COMPUTING ──left──▶
       └────────left───────┴────────left────────┘

A fill is granted when the engine will soon run out of work, so that decode workers set pages aside for a short time
only. Fills that are READY wait for their decode worker's pages: they hold back only fills of the same decode worker.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from cpd.errors import QueueFullError

RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class Place:
    """One fill's place.

    Attributes:
        tokens: Not yet computed, as far as known.
        turn: Resolved when the fill is granted.
    """

    owner: str
    tokens: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    computing: bool = False


class FillQueue:
    """All fills of a prefill worker that still need its engine.

    Args:
        max_tokens: Most tokens that wait; an empty queue takes any fill.
        slack_tokens: A fill is granted while less than this is left to compute.
    """

    def __init__(self, *, max_tokens: int, slack_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._slack_tokens = slack_tokens
        self._waiting: deque[Place] = deque()
        self._granted: list[Place] = []

    @property
    def outside_engine(self) -> list[Place]:
        """Fills that the engine does not know of yet."""
        return [*self._waiting, *(place for place in self._granted if not place.computing)]

    def enter(self, owner: str, tokens: int) -> Place:
        """Queues a fill of the decode worker `owner`.

        Raises:
            QueueFullError: Too many tokens wait already.
        """
        waiting = sum(place.tokens for place in self._waiting)
        if self._waiting and waiting + tokens > self._max_tokens:
            raise QueueFullError(f"{waiting} tokens wait for this prefill worker already", RETRY_AFTER_S)
        place = Place(owner, tokens)
        self._waiting.append(place)
        self._grant()
        return place

    def started(self, place: Place) -> None:
        """The fill is in the engine."""
        place.computing = True
        self._grant()

    def computed(self, place: Place, tokens_left: int) -> None:
        """The fill made progress."""
        place.tokens = tokens_left
        self._grant()

    def leave(self, place: Place) -> None:
        """The fill needs the engine no more, or not at all. Idempotent."""
        if place in self._granted:
            self._granted.remove(place)
        elif place in self._waiting:
            self._waiting.remove(place)
        self._grant()

    def _grant(self) -> None:
        still_waiting: deque[Place] = deque()
        for place in self._waiting:
            ahead = sum(other.tokens for other in self._granted if other.computing or other.owner == place.owner)
            if ahead < self._slack_tokens:
                self._granted.append(place)
                if not place.turn.done():
                    place.turn.set_result(None)
            else:
                still_waiting.append(place)
        self._waiting = still_waiting

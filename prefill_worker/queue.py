"""Whose turn it is: a bounded first-in first-out queue of fills.

    WAITING ──granted──▶ in the engine ──computed and landed, or given up──▶ left
       └────────────────given up───────────────────────────────────────────▶ left

A fill is granted when the engine will soon run out of work, so that decode workers set pages aside for a short time
only. It may then be computed before its landing is known, so that nobody waits for a decode worker that is in the
middle of a step. One that is slow to answer holds back only its own fills.

Pages that wait for a landing must never keep a fill that has one from ending: a decode worker may be waiting for just
that, and the other way round. So they are as many at most as leave room for the longest prompt.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from cpd.blocks import blocks_for
from cpd.errors import QueueFullError

RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class Place:
    """One fill's place.

    Attributes:
        tokens: Of its prompt.
        left: Of those, not yet computed, as far as known.
        turn: Resolved when the fill is granted.
        landed: Whether its decode worker has said where the pages go.
        early: Whether it may be computed before that; known with its turn.
    """

    owner: str
    tokens: int
    left: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    landed: bool = False
    early: bool = False


class FillQueue:
    """All fills of a prefill worker that still need its engine, or a landing.

    Args:
        max_tokens: Most tokens that wait; an empty queue takes any fill.
        slack_tokens: A fill is granted while less than this is left to compute, and less than this of the same
            decode worker has not landed.
        early_pages: Most pages that may wait for a landing.
    """

    def __init__(self, *, max_tokens: int, slack_tokens: int, early_pages: int) -> None:
        self._max_tokens = max_tokens
        self._slack_tokens = slack_tokens
        self._early_pages = early_pages
        self._waiting: deque[Place] = deque()
        self._granted: list[Place] = []

    @property
    def waiting(self) -> list[Place]:
        """Fills that have not had their turn."""
        return list(self._waiting)

    def enter(self, owner: str, tokens: int) -> Place:
        """Queues a fill of the decode worker `owner`.

        Raises:
            QueueFullError: Too many tokens wait already.
        """
        waiting = sum(place.tokens for place in self._waiting)
        if self._waiting and waiting + tokens > self._max_tokens:
            raise QueueFullError(f"{waiting} tokens wait for this prefill worker already", RETRY_AFTER_S)
        place = Place(owner, tokens, tokens)
        self._waiting.append(place)
        self._grant()
        return place

    def computed(self, place: Place, left: int) -> None:
        """The fill has made progress."""
        place.left = left
        self._grant()

    def landed(self, place: Place) -> None:
        """The decode worker has said where the pages go."""
        place.landed = True
        self._grant()

    def leave(self, place: Place) -> None:
        """The fill is over, as far as the engine and the landing go. Idempotent."""
        if place in self._granted:
            self._granted.remove(place)
        elif place in self._waiting:
            self._waiting.remove(place)
        self._grant()

    def _grant(self) -> None:
        left = sum(place.left for place in self._granted if place.early or place.landed)
        held_back: list[Place] = []
        while self._waiting and left < self._slack_tokens:
            place = self._waiting.popleft()
            unlanded = [other for other in self._granted if not other.landed]
            if sum(other.tokens for other in unlanded if other.owner == place.owner) >= self._slack_tokens:
                held_back.append(place)
                continue
            early_pages = sum(blocks_for(other.tokens) for other in unlanded if other.early)
            place.early = early_pages + blocks_for(place.tokens) <= self._early_pages
            left += place.left if place.early else 0
            self._granted.append(place)
            if not place.turn.done():
                place.turn.set_result(None)
        self._waiting.extendleft(reversed(held_back))

"""Whose turn it is: a bounded queue of fills, in the order of `engine.scheduling.fair_queue`.

    WAITING ──granted──▶ in the engine ──computed and landed, or given up──▶ left
       └────────────────given up───────────────────────────────────────────▶ left

A fill is granted when the engine will soon run out of work, so that decode workers set pages aside for a short time
only. It may then be computed before its landing is known, so that nobody waits for a decode worker that is in the
middle of a step. One that is slow to answer holds back only its own fills.

Pages that wait for a landing must never keep a fill that has one from ending: a decode worker may be waiting for just
that, and the other way round. So they are as many at most as leave room for the longest prompt.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from cpd.common.blocks import blocks_for
from cpd.performance.model import Work
from engine.scheduling.fair_queue import FairQueue, Terms
from engine.scheduling.queue_limit import QueueLimit


@dataclass(eq=False, slots=True)
class Place:
    """One fill's place.

    Attributes:
        terms: On which it waits.
        left: Of those, not yet computed, as far as known.
        turn: Resolved when the fill is granted.
        landed: Whether its decode worker has said where the pages go.
        early: Whether it may be computed before that; known with its turn.
    """

    owner: str
    terms: Terms
    left: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    landed: bool = False
    early: bool = False

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        return self.terms.tokens

    @property
    def work(self) -> Work:
        """What it lacks, as far as known."""
        return Work.prefill(self.left, self.tokens - self.left)


class FillQueue:
    """All fills of a prefill worker that still need its engine, or a landing.

    Args:
        max_tokens: Most tokens that wait (`engine.scheduling.queue_limit` has the rule).
        slack_tokens: A fill is granted while less than this is left to compute, and less than this of the same
            decode worker has not landed.
        early_pages: Most pages that may wait for a landing.
        predicted_s: As in `engine.scheduling.queue_limit`.

    Times are those of the fills' deadlines, in seconds.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        slack_tokens: int,
        early_pages: int,
        predicted_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self._max_tokens = max_tokens
        self._slack_tokens = slack_tokens
        self._early_pages = early_pages
        self._waiting = FairQueue[Place]()
        self._backlog = QueueLimit(predicted_s)
        self._predicted_s = predicted_s
        self._granted: list[Place] = []
        self._waiting_work = Work()

    @property
    def waiting(self) -> list[Place]:
        """Fills that have not had their turn, in the order of arrival."""
        return list(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._backlog.tokens

    @property
    def waiting_work(self) -> Work:
        """What they lack, as far as known."""
        return self._waiting_work

    def late_work(self, now: float) -> Work:
        """Of it, that of fills that won't be in time if turns begin at `now`."""
        return Work.total(place.work for place in self._waiting.late(now))

    def enter(self, owner: str, terms: Terms, now: float) -> Place:
        """Queues a fill of the decode worker `owner`.

        Raises:
            QueueFullError: Too many tokens wait already.
        """
        self._backlog.check(terms.tenant, terms.tokens, self._max_tokens, now)
        place = Place(owner, terms, terms.tokens)
        self._waiting.push(place, terms, self._predicted_s(terms.tokens))
        self._backlog.add(terms.tenant, terms.tokens, now)
        self._waiting_work += place.work
        self._grant(now)
        return place

    def computed(self, place: Place, left: int, now: float) -> None:
        """The fill has made progress, or it is known how much of it is to be computed at all."""
        if place in self._waiting:
            self._waiting_work -= place.work
        place.left = left
        if place in self._waiting:
            self._waiting_work += place.work
            self._waiting.expect(place, self._predicted_s(left))
        self._grant(now)

    def landed(self, place: Place, now: float) -> None:
        """The decode worker has said where the pages go."""
        place.landed = True
        self._grant(now)

    def leave(self, place: Place, now: float) -> None:
        """The fill is over, as far as the engine and the landing go. Idempotent."""
        if place in self._granted:
            self._granted.remove(place)
        elif place in self._waiting:
            self._waiting.remove(place)
            self._waiting_work -= place.work
            self._backlog.remove(place.terms.tenant, place.tokens)
        self._grant(now)

    def _grant(self, now: float) -> None:
        left = sum(place.left for place in self._granted if place.early or place.landed)
        while left < self._slack_tokens and (place := self._next(now)) is not None:
            self._waiting.take(place)
            self._waiting_work -= place.work
            self._backlog.take(place.terms.tenant, place.tokens, now)
            early_pages = sum(blocks_for(other.tokens) for other in self._granted if other.early and not other.landed)
            place.early = early_pages + blocks_for(place.tokens) <= self._early_pages
            left += place.left if place.early else 0
            self._granted.append(place)
            if not place.turn.done():
                place.turn.set_result(None)

    def _next(self, now: float) -> Place | None:
        """The first one whose decode worker has not too much that has not landed."""
        unlanded: Counter[str] = Counter()
        for place in self._granted:
            unlanded[place.owner] += 0 if place.landed else place.tokens
        first = self._waiting.first(now)
        candidates = chain([first] if first else [], self._waiting.out_of_turn(now))
        return next((place for place in candidates if unlanded[place.owner] < self._slack_tokens), None)

"""The order of a waiting queue: by priority, fairly among tenants, then by deadline. Reads no clock.

    class      a higher priority goes first
    tenant     within a class by deficit round robin: each round adds QUANTUM tokens to a tenant's credit, and the round
               ends when its next item needs more (Shreedhar and Varghese, 1995)
    deadline   within a tenant the earliest deadline first, without the items that are given up: as few as possible, so
               that the others meet their deadlines (Moore and Hodgson, 1968); then those; then those without a
               deadline; ties in the order of arrival

The item that has waited longest also gets one of AGED_SHARE seconds, whatever its class, tenant and deadline, so that
none starves: if items that take W seconds wait when it comes, its own included, it is taken before AGED_SHARE * W more
seconds plus those of the longest item have been taken. Its tokens count against the tenant's next rounds.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Generic, NamedTuple, TypeVar

QUANTUM = 512
"""Tokens that a round adds to a tenant's credit."""

MAX_DEBT = 8 * QUANTUM
"""Maximum debt of a tenant whose items were taken out of turn while no other tenant of its class waited."""

AGED_SHARE = 8
"""A larger value makes late requests and lower classes wait longer; a smaller one misses more deadlines."""

T = TypeVar("T", bound=Hashable)


class Terms(NamedTuple):
    """The terms on which an item waits.

    Attributes:
        tokens: The cost of taking it.
        tenant: The tenant that pays.
        priority: The item's class.
        deadline: When it should be done, in seconds on the clock of the queue's owner.
    """

    tokens: int
    tenant: str = ""
    priority: int = 0
    deadline: float = inf


class _Entry(NamedTuple, Generic[T]):
    """An item in the queue, ordered by deadline, then arrival.

    Attributes:
        number: Number of the arrival.
        takes_s: Predicted time that the item takes, in seconds.
    """

    deadline: float
    number: int
    item: T
    tokens: int
    takes_s: float


@dataclass(slots=True)
class _Account(Generic[T]):
    """One tenant in one class.

    Attributes:
        credit: Tokens that it may take; negative after items were taken out of turn.
        has_turn: True if it has got its quantum in this round.
        entries: Its items, sorted.
    """

    credit: int = 0
    has_turn: bool = False
    entries: list[_Entry[T]] = field(default_factory=list)

    def first(self, now: float) -> _Entry[T]:
        return next(self.in_order(now)) if len(self.entries) > 1 else self.entries[0]

    def in_order(self, now: float) -> Iterator[_Entry[T]]:
        entries = self.entries
        without = bisect_left(entries, inf, key=_deadline)
        given_up = _given_up(entries[:without], now)
        if not given_up:
            yield from entries
            return
        late = {entry.number for entry in given_up}
        yield from (entry for entry in entries[:without] if entry.number not in late)
        yield from given_up
        yield from entries[without:]


def _given_up(entries: Sequence[_Entry[T]], now: float) -> list[_Entry[T]]:
    """The fewest of these entries without which the others, taken by deadline, meet their deadlines; by deadline."""
    given_up: list[_Entry[T]] = []
    kept: list[tuple[float, int, _Entry[T]]] = []  # a heap, the longest first
    for entry in entries:
        heappush(kept, (-entry.takes_s, -entry.number, entry))
        now += entry.takes_s
        if now > entry.deadline:
            longest = heappop(kept)[2]
            now -= longest.takes_s
            given_up.append(longest)
    return sorted(given_up)


def overdue_part(total: float, late: float) -> float:
    """The part of the waiting `total` that a new item passes if it can be in time.

    That is the `late` part, except what goes first because of its age.
    """
    in_time = max(0.0, total - late)
    return max(0.0, total - in_time * AGED_SHARE / (AGED_SHARE - 1))


def _deadline(entry: _Entry[T]) -> float:
    return entry.deadline


class FairQueue(Generic[T]):
    """A queue in the order that the module describes. `T` is the type of the items."""

    def __init__(self) -> None:
        self._entries: OrderedDict[T, tuple[Terms, _Entry[T]]] = OrderedDict()  # oldest first
        self._classes: dict[int, OrderedDict[str, _Account[T]]] = {}  # by priority; first the tenant of the round
        self._by_deadline: list[_Entry[T]] = []  # sorted
        self._arrivals = 0
        self._past_oldest_s = 0.0  # predicted time of what was taken before the oldest

    def __iter__(self) -> Iterator[T]:
        """Iterates in the order of arrival."""
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, terms: Terms, takes_s: float = 0.0) -> None:
        """Adds an item that is predicted to take `takes_s` seconds."""
        self._arrivals += 1
        entry = _Entry(terms.deadline, self._arrivals, item, terms.tokens, takes_s)
        self._entries[item] = terms, entry
        ring = self._classes.setdefault(terms.priority, OrderedDict())
        insort(ring.setdefault(terms.tenant, _Account()).entries, entry)
        insort(self._by_deadline, entry)

    def first(self, now: float) -> T | None:
        """The item to take at the time `now`."""
        if not self._entries:
            return None
        oldest = next(iter(self._entries))
        if self._past_oldest_s > (AGED_SHARE - 1) * self._entries[oldest][1].takes_s:
            return oldest
        ring = self._classes[max(self._classes)]
        while True:
            tenant, account = next(iter(ring.items()))
            if not account.has_turn:
                account.has_turn = True
                account.credit += QUANTUM
            entry = account.first(now)
            if account.credit >= entry.tokens:
                return entry.item
            account.has_turn = False
            ring.move_to_end(tenant)

    def late(self, now: float) -> list[T]:
        """The items that are given up if the first one begins at `now` and all go by deadline."""
        return [entry.item for entry in _given_up(self._by_deadline, now)]

    def update(self, item: T, takes_s: float) -> None:
        """Changes the predicted time of an item."""
        terms, entry = self._entries[item]
        changed = entry._replace(takes_s=takes_s)
        for entries in (self._classes[terms.priority][terms.tenant].entries, self._by_deadline):
            entries[bisect_left(entries, entry)] = changed
        self._entries[item] = terms, changed

    def out_of_turn(self, now: float, most: int | None = None) -> Iterator[T]:
        """The items that may go if the first one can't: by class, then by the tenant's credit, then by deadline.

        Args:
            most: Maximum number of items of each tenant; None: all of them.
        """
        for priority in sorted(self._classes, reverse=True):
            for account in sorted(self._classes[priority].values(), key=lambda account: -account.credit):
                yield from (entry.item for entry in islice(account.in_order(now), most))

    def take(self, item: T) -> None:
        """Takes the first item, or another one out of turn. The item's tenant pays for it."""
        terms, entry = self._entries[item]
        oldest = next(iter(self._entries))
        due_s = (AGED_SHARE - 1) * self._entries[oldest][1].takes_s
        if item is not oldest and self._past_oldest_s <= due_s:  # one that is due but can't go is owed no more
            self._past_oldest_s += entry.takes_s
        account = self._classes[terms.priority][terms.tenant]
        account.credit = max(account.credit - terms.tokens, -max(terms.tokens, MAX_DEBT))
        self.remove(item)

    def remove(self, item: T) -> None:
        """Removes an item that leaves without being taken."""
        if item is next(iter(self._entries)):
            self._past_oldest_s = max(0.0, self._past_oldest_s - (AGED_SHARE - 1) * self._entries[item][1].takes_s)
        terms, entry = self._entries.pop(item)
        ring = self._classes[terms.priority]
        account = ring[terms.tenant]
        for entries in (account.entries, self._by_deadline):
            del entries[bisect_left(entries, entry)]
        if not account.entries:
            del ring[terms.tenant]
        if not ring:
            del self._classes[terms.priority]
        if not self._entries:
            self._past_oldest_s = 0.0

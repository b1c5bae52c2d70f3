"""Who comes next: the sequences that are ready to run but do not."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from cpd.perfmodel import Work
from engine.fair_queue import FairQueue, Terms
from engine.sequence import Seq, State
from engine.types import Request

MAX_LOOKED_AT, MAX_OF_TENANT = 128, 32
"""So many at most are looked at, for who may pass the first one: a few microseconds for every ten of them."""


def terms_of(request: Request) -> Terms:
    """On which terms a request waits for its first turn."""
    return Terms(len(request.token_ids), request.tenant, request.priority, request.deadline)


@dataclass(slots=True)
class _Shortage:
    """The first in line found no row, or too few pages although so many were available."""

    seq: Seq
    available: int
    headroom: int
    overtaken: bool = False


class Line:
    """The whole line: those who come back (preempted, without a page at their start, or woken), then the queue.

    It also keeps reservations, which come from outside the line, from starving it: while the first one is short of
    pages or rows, one reservation may overtake it, and no further one before it has been admitted. Those who come back
    are left all that they need (`engine/reservations.py`).

    Attributes:
        queue: Sequences that have not had their turn.
        returning: Those that have had it, oldest first.
    """

    def __init__(self) -> None:
        self.queue = FairQueue[Seq]()
        self.returning: list[Seq] = []
        self._shortage: _Shortage | None = None

    def __iter__(self) -> Iterator[Seq]:
        yield from self.returning
        yield from self.queue

    def __len__(self) -> int:
        return len(self.returning) + len(self.queue)

    def first(self, now: float) -> Seq | None:
        """Who comes next at the time `now`."""
        return self.returning[0] if self.returning else self.queue.first(now)

    def out_of_turn(self, now: float) -> Iterator[Seq]:
        """Some of those who may pass the first one."""
        return islice(chain(self.returning, self.queue.out_of_turn(now, MAX_OF_TENANT)), MAX_LOOKED_AT)

    def late_work(self, now: float) -> Work:
        """Of those who wait for their first turn and won't be in time if turns begin at `now`."""
        return Work.total(seq.work for seq in self.queue.late(now))

    def push(self, seq: Seq, takes_s: float = 0.0) -> None:
        """A new sequence, whose prompt is predicted to take so long."""
        self.queue.push(seq, terms_of(seq.request), takes_s)

    def put_back(self, seq: Seq) -> None:
        """A sequence that has had its turn comes before the queue."""
        seq.state = State.RETURNING
        insort(self.returning, seq, key=lambda other: other.order)

    def take(self, seq: Seq) -> None:
        """A sequence has its turn: it runs or is parked."""
        if seq.state is not State.RETURNING:
            self.queue.take(seq)
        self._forget(seq)

    def remove(self, seq: Seq) -> None:
        """A sequence goes, and has not had its turn."""
        if seq.state is not State.RETURNING:
            self.queue.remove(seq)
        self._forget(seq)

    def short(self, seq: Seq, available: int, headroom: int) -> None:
        """The first in line found too few pages with this many available (-1: no row)."""
        overtaken = self._shortage is not None and self._shortage.overtaken  # maybe with another one in front
        self._shortage = _Shortage(seq, available, headroom, overtaken)

    def still_short(self, seq: Seq, available: int, headroom: int) -> bool:
        """Whether it is no use trying again: spares looking its blocks up in each step."""
        short = self._shortage
        return short is not None and short.seq is seq and available <= short.available and headroom >= short.headroom

    @property
    def may_be_overtaken(self) -> bool:
        """Whether a reservation may take pages that the first one may be short of."""
        return self._shortage is None or not self._shortage.overtaken

    def overtake(self) -> None:
        """A reservation was made."""
        if self._shortage is not None:
            self._shortage.overtaken = True

    def _forget(self, seq: Seq) -> None:
        if seq.state is State.RETURNING:
            self.returning.remove(seq)
        if self._shortage is not None and self._shortage.seq is seq:
            self._shortage = None

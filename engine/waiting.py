"""Who comes next: the sequences that are ready to run but do not."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.sequence import Seq, State


class WaitingQueue:
    """Sequences that have not had their turn: first in, first out. Nothing else knows this order."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Seq, None] = OrderedDict()

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, seq: Seq) -> None:
        """Adds a sequence."""
        self._queue[seq] = None

    def peek(self) -> Seq | None:
        """Whose turn it is."""
        return next(iter(self._queue), None)

    def pop(self) -> Seq:
        """Takes out the one that `peek` returns."""
        return self._queue.popitem(last=False)[0]

    def remove(self, seq: Seq) -> None:
        """Takes out any one."""
        del self._queue[seq]


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
    pages or rows, one reservation may overtake it, and no further one before it has been admitted.

    Attributes:
        queue: Sequences that have not had their turn.
        returning: Those that have had it, oldest first.
    """

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.returning: list[Seq] = []
        self._shortage: _Shortage | None = None

    def __iter__(self) -> Iterator[Seq]:
        yield from self.returning
        yield from self.queue

    def __len__(self) -> int:
        return len(self.returning) + len(self.queue)

    def first(self) -> Seq | None:
        """Who comes next."""
        return self.returning[0] if self.returning else self.queue.peek()

    def put_back(self, seq: Seq) -> None:
        """A sequence that has had its turn comes before the queue."""
        seq.state = State.RETURNING
        insort(self.returning, seq, key=lambda other: other.order)

    def remove(self, seq: Seq) -> None:
        """A sequence goes, to run or for other reasons."""
        if seq.state is State.RETURNING:
            self.returning.remove(seq)
        elif seq is self.queue.peek():
            self.queue.pop()
        else:
            self.queue.remove(seq)
        if self._shortage is not None and self._shortage.seq is seq:
            self._shortage = None

    def short(self, seq: Seq, available: int, headroom: int) -> None:
        """The first in line found too few pages with this many available (-1: no row)."""
        overtaken = self._shortage is not None and self._shortage.seq is seq and self._shortage.overtaken
        self._shortage = _Shortage(seq, available, headroom, overtaken)

    def still_short(self, seq: Seq, available: int, headroom: int) -> bool:
        """Whether it is no use trying again: spares looking its blocks up in each step."""
        short = self._shortage
        return short is not None and short.seq is seq and available <= short.available and headroom >= short.headroom

    @property
    def may_be_overtaken(self) -> bool:
        """Whether a reservation may take pages now."""
        return not self.returning and (self._shortage is None or not self._shortage.overtaken)

    def overtake(self) -> None:
        """A reservation was made."""
        if self._shortage is not None:
            self._shortage.overtaken = True

"""The waiting queue: the sequences that are ready to run but have no row or pages."""

from bisect import insort
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain, islice

from cpd.performance.model import Work
from engine.scheduling.fair_queue import FairQueue, Terms
from engine.scheduling.queue_limit import QueueLimit
from engine.scheduling.sequence import Sequence
from engine.types import Request

MAX_PASSING, MAX_PASSING_OF_TENANT = 128, 32
"""Maximum number of sequences to look at for one that may pass the first. Ten take a few microseconds."""


class MayStart(Enum):
    """Which of the waiting sequences may start."""

    ALL = auto()
    SCHEDULED_BEFORE = auto()
    NONE = auto()


def terms_of(request: Request) -> Terms:
    """The terms on which a request waits in a fair queue."""
    return Terms(len(request.token_ids), request.tenant, request.priority, request.deadline)


class WaitingQueue:
    """Resumable sequences (preempted, woken, or forked without a page), then new ones in fair order.

    The queue also protects its first sequence from landings, which don't wait in it: while that sequence lacks pages or
    a row, one landing may overtake it, but no second one before it is scheduled. Landings leave resumable sequences all
    pages that they need (`Scheduler.spare_for_reservation`).

    Attributes:
        limit: Counts the tokens of all sequences that have never been scheduled, those that wait for a prefix included.
        queued_work: The work of these sequences.
        resumable: Resumable sequences, oldest first.
        may_start: Which sequences `first` and `passing` return.
    """

    def __init__(self, limit: QueueLimit | None = None) -> None:
        self.limit = limit or QueueLimit()
        self.queued_work = Work()
        self.resumable: list[Sequence] = []
        self.may_start = MayStart.ALL
        self._new = FairQueue[Sequence]()
        self._blocked: tuple[Sequence, int] | None = None  # the first one, and the version at which it was blocked
        self._overtaken = False

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.resumable
        yield from self._new

    def __len__(self) -> int:
        return len(self.resumable) + len(self._new)

    def first(self, now: float) -> Sequence | None:
        """The sequence to schedule next at the time `now`; None if none may start."""
        if self.may_start is not MayStart.ALL:
            return next(self._scheduled_before(), None)
        return self.resumable[0] if self.resumable else self._new.first(now)

    def passing(self, now: float) -> Iterator[Sequence]:
        """Sequences that may pass the first one, up to `MAX_PASSING`."""
        if self.may_start is not MayStart.ALL:
            return islice(self._scheduled_before(), MAX_PASSING)
        return islice(chain(self.resumable, self._new.out_of_turn(now, MAX_PASSING_OF_TENANT)), MAX_PASSING)

    def late_work(self, now: float) -> Work:
        """The work of new sequences that are given up, for now, if scheduling begins at `now`."""
        return Work.total(seq.work for seq in self._new.late(now))

    def add(self, seq: Sequence, work: Work, takes_s: float) -> None:
        """Adds a new sequence, with its work and the predicted time of that."""
        seq.queued, seq.work = True, work
        self.queued_work += work
        self.limit.add(seq.request.tenant, seq.num_tokens, seq.request.received)
        self._new.push(seq, terms_of(seq.request), takes_s)

    def resume(self, seq: Sequence) -> None:
        """Adds a sequence that was scheduled before."""
        insort(self.resumable, seq, key=lambda other: other.order)

    def take(self, seq: Sequence) -> None:
        """Takes a sequence out that is scheduled: it runs or waits for a prefix."""
        if seq in self._new:
            self._new.take(seq)
        else:
            self.resumable.remove(seq)
        self._unblock(seq)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that ends before it is scheduled."""
        if seq in self._new:
            self._new.remove(seq)
        else:
            self.resumable.remove(seq)
        self._unblock(seq)

    def first_run(self, seq: Sequence, now: float) -> None:
        """Stops counting a sequence, taken before, that runs for the first time."""
        self.limit.take(seq.request.tenant, seq.num_tokens, now)
        self._not_queued(seq)

    def give_up(self, seq: Sequence) -> None:
        """Stops counting a sequence that ends before it has run."""
        self.limit.remove(seq.request.tenant, seq.num_tokens)
        self._not_queued(seq)

    def block(self, seq: Sequence, version: int) -> None:
        """Notes that the first sequence can't start at this version of the scheduler."""
        self._blocked = seq, version

    def is_blocked(self, seq: Sequence, version: int) -> bool:
        """True if a sequence could not start at this version."""
        return self._blocked == (seq, version)

    @property
    def may_be_overtaken(self) -> bool:
        """True if a landing may take pages that the first sequence may lack."""
        return self._blocked is None or not self._overtaken

    def landing_overtook_first(self) -> None:
        """Notes that a landing was reserved, before the first sequence if that one is blocked."""
        self._overtaken = self._blocked is not None

    def check_integrity(self, queued: list[Sequence]) -> None:
        """Raises AssertionError unless exactly these sequences count against the limit."""
        if self.limit.tokens != sum(seq.num_tokens for seq in queued):
            raise AssertionError("the count of queued tokens is wrong")
        if self.queued_work != Work.total(seq.work for seq in queued):
            raise AssertionError("the work of the queued sequences is wrong")

    def _scheduled_before(self) -> Iterator[Sequence]:
        """The sequences that may start if new ones may not."""
        if self.may_start is MayStart.SCHEDULED_BEFORE:
            yield from (seq for seq in self.resumable if not seq.queued)

    def _not_queued(self, seq: Sequence) -> None:
        self.queued_work -= seq.work
        seq.queued = False

    def _unblock(self, seq: Sequence) -> None:
        if self._blocked is not None and self._blocked[0] is seq:
            self._blocked, self._overtaken = None, False

"""The queue of requests that have not had their turn. First in, first out."""

from collections import OrderedDict
from collections.abc import Iterator

from engine.sequence import Seq


class WaitingQueue:
    """Decides whose turn is next; nothing else knows the order."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Seq, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._queue)

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

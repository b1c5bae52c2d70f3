"""The thread on which one connection writes pages. It sleeps while nothing is being written."""

import asyncio
import atexit
import functools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpd.common.errors import TransferError

_FIRST_LOOK_S = 0.0001
_SLOWEST_LOOK_S = 0.002
_EXIT_S = 5.0

Pages = NDArray[np.int64]
Ended = Callable[[TransferError | None], None]
"""Called on the event loop when something has ended, with what went wrong."""


class Door(Protocol):
    """A way into one other pool."""

    def write(self, own: Pages, theirs: Pages, counts: Pages) -> int:
        """Begins to write own pages `own[k]`, `own[k] + 1`, … to their `theirs[k]`, …, `counts[k]` of them, for all k.

        Returns a number to ask `written` with. Raises TransferError if the peer is gone.
        """

    def written(self, handle: int) -> bool:
        """Whether all of it has arrived; then the number is used up. Raises TransferError if the peer is gone."""

    def close(self) -> None:
        """Returns when nothing is read or written through it any more. Raises TransferError if nobody can tell."""


class Writer:
    """Writes through a door in order.

    Several writes are under way at once where they go on in the background (a network); between processes of one
    machine a write is the thread's own copy, and the next one begins when it is done.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flying: dict[int, Ended] = {}  # by the door's number
        self._door: Door | None = None
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A daemon thread inside NIXL must not meet the interpreter's end.
        atexit.register(self._stop_at_exit)

    def open(self, make: Callable[[], Door], opened: Ended) -> None:
        """Has `make` make the door."""
        self._calls.put(functools.partial(self._open, make, opened))

    def write(self, own: Pages, theirs: Pages, counts: Pages, written: Ended) -> None:
        """See `Door.write`."""
        self._calls.put(functools.partial(self._write, own, theirs, counts, written))

    async def close(self) -> None:
        """Closes the door after the calls before this one, with whatever still flies, and ends the thread.

        When it returns, nothing reads or writes pages through the door any more. It does not where nobody can tell, as
        of a GPU that is broken: the thread ends by an error then, which is to end the process.
        """
        self._calls.put(None)
        await self._closed.wait()

    def _stop_at_exit(self) -> None:
        self._calls.put(None)
        self._thread.join(_EXIT_S)

    # ---- everything below runs on the thread

    def _open(self, make: Callable[[], Door], opened: Ended) -> None:
        error = None
        try:
            self._door = make()
        except Exception as problem:
            error = _failure(problem)
        self._tell(opened, error)

    def _write(self, own: Pages, theirs: Pages, counts: Pages, written: Ended) -> None:
        assert self._door is not None
        try:
            handle = self._door.write(own, theirs, counts)
        except Exception as problem:
            self._tell(written, _failure(problem))
        else:
            self._flying[handle] = written
            self._look()

    def _run(self) -> None:
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                call = self._calls.get(timeout=pause_s if self._flying else None)
            except queue.Empty:
                pause_s = _FIRST_LOOK_S if self._look() else min(2 * pause_s, _SLOWEST_LOOK_S)
                continue
            if call is None:
                break
            call()
        self._flying.clear()
        if self._door is not None:
            self._door.close()
        atexit.unregister(self._stop_at_exit)
        self._tell(self._closed.set)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has nobody to tell
                raise

    def _look(self) -> bool:
        """Reports the writes that have ended. Returns whether there were any."""
        assert self._door is not None
        ended = False
        for handle, written in list(self._flying.items()):
            error = None
            try:
                if not self._door.written(handle):
                    continue
            except Exception as problem:
                error = _failure(problem)
            del self._flying[handle]
            self._tell(written, error)
            ended = True
        return ended


def _failure(problem: Exception) -> TransferError:
    """What callers are told, whatever a door raised: the thread must live to be closed."""
    return problem if isinstance(problem, TransferError) else TransferError(f"the pages can't be written: {problem}")

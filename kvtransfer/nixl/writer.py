"""The thread on which one connection writes pages. It sleeps while nothing is being written."""

import asyncio
import atexit
import functools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from cpd.common.errors import TransferError
from kvtransfer.segments import Addresses

_FIRST_POLL_S = 0.0001
_SLOWEST_POLL_S = 0.002
_EXIT_S = 5.0

OnEnd = Callable[[TransferError | None], None]
"""Called on the event loop when an operation has ended, with its error."""


class WriterBackend(Protocol):
    """Writes into one other pool. Its methods raise TransferError if the peer is gone."""

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses) -> int:
        """Starts to copy `num_bytes[k]` from own `sources[k]` to the peer's `targets[k]`, for all k.

        Returns a handle for `written`.
        """

    def written(self, handle: int) -> bool:
        """True if all of it has arrived. Then the handle is used up."""

    def close(self) -> None:
        """Returns when nothing is read or written through it any more. Raises TransferError if that can't be known."""


class Writer:
    """Writes through a back end, in order.

    Over a network several writes are in flight at once. Between processes of one machine a write is the thread's own
    copy, and the next one starts when it is done.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_flight: dict[int, OnEnd] = {}  # by the back end's handle
        self._backend: WriterBackend | None = None
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A daemon thread must not be inside NIXL when the interpreter ends.
        atexit.register(self._stop_at_exit)

    def open(self, make: Callable[[], WriterBackend], opened: OnEnd) -> None:
        """Creates the back end on the thread."""
        self._calls.put(functools.partial(self._open, make, opened))

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses, written: OnEnd) -> None:
        """Queues a write; see `WriterBackend.write`."""
        self._calls.put(functools.partial(self._write, sources, targets, num_bytes, written))

    async def close(self) -> None:
        """Runs the calls before this one, closes the back end with all that is in flight, and ends the thread.

        When it returns, nothing reads or writes pages through the back end any more. If that can't be known, as with a
        broken GPU, it does not return: the thread raises an error, which should end the process.
        """
        self._calls.put(None)
        await self._closed.wait()

    def _stop_at_exit(self) -> None:
        self._calls.put(None)
        self._thread.join(_EXIT_S)

    # ---- on the thread

    def _open(self, make: Callable[[], WriterBackend], opened: OnEnd) -> None:
        error = None
        try:
            self._backend = make()
        except Exception as problem:
            error = _failure(problem)
        self._tell(opened, error)

    def _write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses, written: OnEnd) -> None:
        assert self._backend is not None
        try:
            handle = self._backend.write(sources, targets, num_bytes)
        except Exception as problem:
            self._tell(written, _failure(problem))
        else:
            self._in_flight[handle] = written
            self._poll()

    def _run(self) -> None:
        pause_s = _FIRST_POLL_S
        while True:
            try:
                call = self._calls.get(timeout=pause_s if self._in_flight else None)
            except queue.Empty:
                pause_s = _FIRST_POLL_S if self._poll() else min(2 * pause_s, _SLOWEST_POLL_S)
                continue
            if call is None:
                break
            call()
        self._in_flight.clear()
        if self._backend is not None:
            self._backend.close()
        atexit.unregister(self._stop_at_exit)
        self._tell(self._closed.set)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # nobody waits on a closed loop
                raise

    def _poll(self) -> bool:
        """Reports the writes that have ended. Returns True if there were any."""
        assert self._backend is not None
        ended = False
        for handle, written in list(self._in_flight.items()):
            error = None
            try:
                if not self._backend.written(handle):
                    continue
            except Exception as problem:
                error = _failure(problem)
            del self._in_flight[handle]
            self._tell(written, error)
            ended = True
        return ended


def _failure(problem: Exception) -> TransferError:
    """The error reported for anything a back end raises: the thread must stay alive to be closed."""
    return problem if isinstance(problem, TransferError) else TransferError(f"the pages can't be written: {problem}")

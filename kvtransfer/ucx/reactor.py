"""The thread that owns UCX: it makes every call into UCX, so that no other thread ever waits for UCX.

Each pass runs the calls of other threads, lets UCX progress (without the GIL) and polls the channels. If there was
nothing to do, the thread sleeps until UCX, another thread or a deadline wakes it; an idle transport takes no CPU. While
much data arrives it naps instead: over TCP, waking up for each packet costs both ends more than the bytes do.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from cpd.common.errors import ConfigError, TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.latch import Latch
from kvtransfer.ucx.memory import OpenMemory, Ucp

log = logging.getLogger(__name__)

T = TypeVar("T")

_LISTEN_BACKLOG = 128
_EXIT_S = 5.0
_DRAIN_S = 0.2
_NAP_S = 500e-6
_MOST_NAPS = 40  # in a row with nothing to do
# UCX reads these when it is set up; an operator's own settings win. It would log to stdout, and its errors are raised
# anyway.
_UCX_LOGGING = {"UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}


class Channel(Protocol):
    """A connection that the reactor drives. All methods are called on its thread."""

    def poll(self, now: float) -> bool:
        """Makes progress without waiting. Returns True if anything was done."""

    def wake_at(self) -> float | None:
        """When to poll again even if nothing happens, in `time.monotonic` seconds. None if never."""

    def streams(self) -> bool:
        """True if so much data is arriving that it takes longer than a nap."""

    def fail(self, reason: str) -> None:
        """Ends the connection. Idempotent."""


class Reactor:
    """A listening UCX worker, its pool, and its thread.

    Attributes:
        ucx: The module `ucxx.libucxx`, once started.
        array: Wraps a contiguous buffer for ucxx's sends and receives.
        ucp: UCX's C interface, once started.
        memory: The pool, open to peers with a connection and the key, once started.
        channels: The channels to poll. They add and remove themselves, on the thread.
        port: Port it listens on, once started.

    Args:
        options: UCX configuration, names without the prefix `UCX_`.
        host: IPv4 address to listen on.
        pool: Memory that peers may write into.
        accept: Called on the thread with the endpoint of each incoming connection; may raise UCX's errors.
        ended: Called on the thread with the reason, after all channels have failed. Nothing touches memory any more.
    """

    ucx: Any
    array: Any
    worker: Any
    ucp: Ucp
    port: int

    def __init__(
        self,
        options: Mapping[str, str],
        host: str,
        pool: PoolMemory,
        *,
        accept: Callable[[Any], None],
        ended: Callable[[str], None],
    ) -> None:
        self.channels: set[Channel] = set()
        self._options = dict(options)
        self._host = host
        self._pool = pool
        self.memory: OpenMemory | None = None
        self._accept = accept
        self._on_end = ended
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of _calls and _ended
        self._ended = False
        self._started = False
        self._stopping = False
        self._error: Exception | None = None
        self._up, self._down = (Latch(asyncio.get_running_loop()) for _ in range(2))
        self._requests: deque[int] = deque()  # UCX's handles of incoming connections
        self._undrained: list[Any] = []
        self._naps = 0  # since the last pass with anything to do
        self._thread = threading.Thread(target=self._run, name="kvtransfer-ucx", daemon=True)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    async def start(self) -> None:
        """Starts the thread.

        Raises:
            ConfigError: `host` is not an address of this machine.
            TransferError: UCX cannot be set up.
        """
        self._thread.start()
        # A daemon thread must not be inside UCX when the interpreter ends.
        atexit.register(self._stop_at_exit)
        await self._up.wait()
        if self._error is not None:
            await self.stop()
            if isinstance(self._error, ConfigError):
                raise self._error
            raise TransferError(f"cannot set UCX up on {self._host}: {self._error}")

    def call(self, action: Callable[[], None]) -> None:
        """Runs `action`, which must not raise, on the thread, soon and in order. May be called from any thread.

        After the thread's end it runs at once on the caller's: nothing else touches the channels any more.
        """
        with self._lock:
            if not self._ended:
                self._calls.append(action)
                os.eventfd_write(self._wake, 1)
                return
        action()

    async def run(self, action: Callable[[], T]) -> T:
        """Runs `action` like `call`; returns its result or raises its error. If cancelled, it may have run or not."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.call(act)
        return await asyncio.wrap_future(future)

    async def stop(self) -> None:
        """Fails all channels and ends the thread. Idempotent."""
        self.call(self._stop)
        await self._down.wait()
        self._join()

    def _stop(self) -> None:
        self._stopping = True

    def _stop_at_exit(self) -> None:
        self.call(self._stop)
        self._join()

    def _join(self) -> None:
        atexit.unregister(self._stop_at_exit)
        self._thread.join(_EXIT_S)

    # ---- everything below runs on the thread

    def connect(self, host: str, port: int) -> Any:
        """The endpoint of a new connection to an IPv4 address. It fails later if nobody answers."""
        return self.ucx.UCXEndpoint.create(self.worker, host, port, endpoint_error_handling=True)

    def drain(self, requests: list[Any]) -> None:
        """Waits for the requests of a closed endpoint, which UCX has cancelled."""
        deadline = time.monotonic() + _DRAIN_S
        self.worker.progress()
        while left := [request for request in requests if not request.completed]:
            if time.monotonic() > deadline:
                log.debug("UCX still holds %d requests of a closed endpoint", len(left))
                self._undrained += left  # UCX may still complete them: they must stay alive
                return
            self.worker.progress()

    def _run(self) -> None:
        reason = "the transport was closed"
        try:
            poller = self._open()
            self._started = True
            self._up.set()
            try:
                while not self._stopping:
                    if self._pass():
                        self._naps = 0
                    else:
                        self._sleep(poller)
            finally:
                poller.close()
        except Exception as error:
            if self._started:
                log.exception("the KV transfer thread failed")
            reason = f"the transfer thread failed: {error}"
            self._error = error
        try:
            self._shut(reason)
        finally:
            self._up.set()
            self._down.set()

    def _open(self) -> select.epoll:
        for name, value in _UCX_LOGGING.items():
            os.environ.setdefault(name, value)
        from ucxx import libucxx
        from ucxx._lib.arr import Array

        kinds = libucxx.Feature
        context = libucxx.UCXContext(self._options, feature_flags=(kinds.RMA, kinds.TAG, kinds.STREAM, kinds.WAKEUP))
        self.ucx, self.array, self.ucp = libucxx, Array, Ucp()
        self.memory = OpenMemory(self.ucp, context.handle, self._pool.pointer, self._pool.num_bytes)
        self.worker = libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self.worker.init_blocking_progress_mode()
        self._listener = libucxx.UCXListener.create(self.worker, 0, self._requests.append)
        self.port = _rebind(self._listener.port, self._host)
        poller = select.epoll()
        poller.register(self.worker.epoll_file_descriptor, select.EPOLLIN)
        poller.register(self._wake, select.EPOLLIN)
        return poller

    def _pass(self) -> bool:
        worked = False
        while self._calls:
            self._calls.popleft()()
            worked = True
        self.worker.progress()
        while self._requests:
            self._accept_request(self._requests.popleft())
            worked = True
        now = time.monotonic()
        for channel in tuple(self.channels):
            worked |= channel.poll(now)
        return worked

    def _accept_request(self, request: int) -> None:
        try:
            self._accept(self._listener.create_endpoint_from_conn_request(request, True))
        except self.ucx.UCXError as error:
            log.info("an incoming connection broke: %s", error)

    def _sleep(self, poller: select.epoll) -> None:
        if self._naps < _MOST_NAPS and any(channel.streams() for channel in self.channels):
            self._naps += 1
            time.sleep(_NAP_S)
            return
        if not self.worker.arm():
            return
        wake_at = min((at for channel in self.channels if (at := channel.wake_at()) is not None), default=None)
        poller.poll(None if wake_at is None else max(0.0, wake_at - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _shut(self, reason: str) -> None:
        for channel in tuple(self.channels):
            channel.fail(reason)
        if self.memory is not None:
            self.memory.close()
        # UCX closes its sockets when its last Python object is gone.
        self._undrained.clear()
        self._listener = self.worker = None
        self._on_end(reason)
        with self._lock:
            self._ended = True
            rest, self._calls = self._calls, deque()
            os.close(self._wake)
        for action in rest:
            action()


def _rebind(port: int, host: str) -> int:
    """Moves the socket that listens on `port` of every interface to a port of `host`; returns the new port.

    ucxx takes no address to listen on. A listening socket that was shut down can be bound again, and UCX keeps watching
    the same file descriptor.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as listening:
                if not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if listening.family is not socket.AF_INET or listening.getsockname()[1] != port:
                    continue
                listening.shutdown(socket.SHUT_RDWR)
                listening.bind((host, 0))
                listening.listen(_LISTEN_BACKLOG)
                bound: int = listening.getsockname()[1]
                return bound
    raise ConfigError(f"host: cannot listen on {host}; give an IPv4 address of this machine")

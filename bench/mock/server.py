"""The mock server itself: one thread, epoll for what comes in, a heap of absolute times for what goes out.

Every step of every stream has its time from the start, so lateness of one does not delay the next.
"""

import heapq
import itertools
import select
import socket
import time
from array import array
from collections.abc import Iterator
from typing import Protocol

from bench.mock.answer import Request, Step, json_response
from bench.mock.behaviour import Behaviour
from bench.mock.clock import WorkClock
from bench.mock.connection import Connection
from bench.mock.requests import Requests

BATCH = 16
"""Steps in a row before sockets are looked at, and the other way round: neither waits long for the other."""


class _Timed(Protocol):
    """Something with a time to act."""

    def act(self, now: float) -> float | None:
        """Does what is due at the wall time `now`, and says when it wants to act again, in work time."""
        ...


class _Stream:
    """An answer on its way."""

    def __init__(
        self, connection: Connection, steps: Iterator[Step], start: float, times: "array[float] | None"
    ) -> None:
        self._connection = connection
        self._steps = steps
        self._start = start
        self._times = times  # of chunks with text
        self._next: Step | None = next(steps, None)

    def act(self, now: float) -> float | None:
        step = self._next
        if step is None or self._connection.closed:
            return None
        if self._times is not None and step.content:
            self._times.append(now)
        self._connection.write(step.payload)
        if step.then:
            self._connection.close(reset=step.then == "reset")
        self._next = step = next(self._steps, None)
        return None if step is None else self._start + step.at_s


class _Stall:
    """The one stall."""

    def __init__(self, clock: WorkClock, due: float, seconds: float) -> None:
        self._clock = clock
        self._due = due
        self._seconds = seconds

    def act(self, now: float) -> None:
        self._clock.freeze(self._clock.wall(self._due), self._seconds)  # not from `now`, which may be a bit late


class Server:
    """Listens from the start, serves while `run` runs.

    Raises:
        OSError: It cannot listen on this host and port.
    """

    def __init__(self, behaviour: Behaviour, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=4096)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._behaviour = behaviour
        self._requests = Requests(behaviour)
        self._clock = WorkClock()
        self._heap: list[tuple[float, int, _Timed]] = []
        self._order = itertools.count()  # decides between equal times
        self._stalls = behaviour.stall_s > 0  # the stall is still to come
        self._times: dict[str, array[float]] = {}

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until the process ends."""
        while True:
            self._act()
            # select() counts in microseconds, epoll's own timeout in milliseconds.
            if select.select([self._epoll], [], [], self._until_next_s())[0]:
                for fd, events in self._epoll.poll(0, BATCH):
                    if fd == self._listener.fileno():
                        self._accept()
                    elif connection := self._connections.get(fd):
                        connection.ready(events)

    def _act(self) -> None:
        heap = self._heap
        for _ in range(BATCH):
            now = time.perf_counter()
            if not heap or heap[0][0] >= self._clock.work(now):
                return
            _, order, timed = heap[0]
            again = timed.act(now)
            if again is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (again, order, timed))

    def _until_next_s(self) -> float | None:
        if not self._heap:
            return None
        return max(0.0, self._clock.wall(self._heap[0][0]) - time.perf_counter())

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection = Connection(sock, self._epoll, self._request, self._connections.pop)
            self._connections[sock.fileno()] = connection

    def _request(self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        now = time.perf_counter()
        if (method, path) == ("GET", "/sends") and self._behaviour.keep_sends:
            sends = {prompt: list(times) for prompt, times in self._times.items()}
            connection.write(json_response(200, sends))
            return
        start = self._clock.work(now)
        answered = self._requests.answer(method, path, headers, body)
        times = self._begin(answered.request, now) if answered.request else None
        self._plan(start, _Stream(connection, answered.steps, start, times))

    def _begin(self, request: Request, now: float) -> "array[float] | None":
        """What a request for text, read at `now`, does to everybody. Returns where its times are kept, if they are."""
        if self._stalls:
            self._stalls = False
            due = self._clock.work(now) + self._behaviour.stall_at_s
            self._plan(due, _Stall(self._clock, due, self._behaviour.stall_s))
        if self._behaviour.prefill_us_per_token:
            self._clock.freeze(now, request.prompt_tokens * self._behaviour.prefill_us_per_token / 1e6)
        if not self._behaviour.keep_sends:
            return None
        times = self._times[request.prompt] = array("d", [now])
        return times

    def _plan(self, due: float, timed: _Timed) -> None:
        heapq.heappush(self._heap, (due, next(self._order), timed))

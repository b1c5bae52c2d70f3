"""Sends one client process's share of a workload.

A session's turns follow one another: each carries the answers before it, and the first failure ends the session.
"""

import asyncio
import time
from collections.abc import Callable

from bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from bench.client.client import Client
from bench.load.clock import Clock
from bench.record import Record
from bench.workloads.base import Message, Session, Workload


class Sender:
    """Plays sessions against the server.

    Args:
        client: Whom to ask.
        workload: What to ask.
        clock: For times to keep.
        take: The number of the next session that no process has begun yet (closed loops).
        finished: Called with every record when its request has ended.
    """

    def __init__(
        self,
        client: Client,
        workload: Workload,
        clock: Clock,
        take: Callable[[], int],
        finished: Callable[[Record], None],
    ) -> None:
        self._client = client
        self._workload = workload
        self._clock = clock
        self._take = take
        self._finished = finished
        self._end_s = float("inf")
        self._running: dict[int, Record] = {}

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Those of them that have no token yet."""
        return sum(not record.content_s for record in self._running.values())

    async def send(self, arrivals: Arrivals, start_s: float, duration_s: float | None, process: int, of: int) -> None:
        """Sends this process's share (`process` of `of`), beginning at `start_s`; returns when all has ended."""
        if duration_s is not None:
            self._end_s = start_s + duration_s
        async with asyncio.TaskGroup() as tasks:
            if isinstance(arrivals, OpenLoop):
                for index in range(process, len(arrivals.due_s), of):
                    session = self._workload.session(index)
                    due_s = start_s + float(arrivals.due_s[index])
                    await self._clock.until(due_s)
                    tasks.create_task(self.play(session, due_s))
            else:
                await self._clock.until(start_s)
                for _ in range(process, arrivals.streams, of):
                    tasks.create_task(self._repeat(arrivals))

    async def _repeat(self, loop: ClosedLoop) -> None:
        while time.perf_counter() < self._end_s:
            index = self._take()
            if loop.sessions is not None and index >= loop.sessions:
                return
            session = self._workload.session(index)
            due_s = time.perf_counter()
            if pause_s := loop.pause_s(index):
                due_s += pause_s
                if due_s >= self._end_s:
                    return
                await self._clock.until(due_s)
            await self.play(session, due_s)

    async def play(self, session: Session, due_s: float) -> None:
        conversation = list(session.opening)
        for number, turn in enumerate(session.turns):
            if number:
                due_s = time.perf_counter()
                if turn.think_s:
                    due_s += turn.think_s
                    await self._clock.until(min(due_s, self._end_s))
                if due_s >= self._end_s:
                    return
            conversation.append(Message("user", turn.text))
            record = Record(session.index, number, turn.input_len, turn.output_len, due_s, due_s)
            answer = await self._ask(record, conversation)
            if record.error:
                return
            conversation.append(Message("assistant", answer))

    async def _ask(self, record: Record, conversation: list[Message]) -> str:
        self._running[id(record)] = record
        try:
            return await self._client.stream(record, conversation)
        finally:
            del self._running[id(record)]
            self._finished(record)

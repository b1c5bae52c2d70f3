"""Sends one client process's share of a workload.

The turns of a session follow one another. Each has the answers before it, and the first failure ends the session.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from bench.client.client import Client
from bench.load.clock import Clock
from bench.record import Record
from bench.workloads.base import Message, Session, Workload


@dataclass(slots=True, eq=False)
class Sender:
    """Sends sessions to the server.

    Args:
        client: Sends requests.
        workload: Makes sessions.
        clock: Keeps exact times.
        take: Returns the number of the next session to begin (closed loops).
        finished: Called with the record of each request when it has ended.
    """

    client: Client
    workload: Workload
    clock: Clock
    take: Callable[[], int]
    finished: Callable[[Record], None]
    _end_s: float = field(default=math.inf, init=False)
    _running: dict[int, Record] = field(default_factory=dict, init=False)

    @property
    def in_flight(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of running requests without a token yet."""
        return sum(not record.content_s for record in self._running.values())

    async def send(self, arrivals: Arrivals, start_s: float, duration_s: float | None, process: int, of: int) -> None:
        """Sends share `process` of `of`, beginning at `start_s`. Returns when all requests have ended."""
        if duration_s is not None:
            self._end_s = start_s + duration_s
        async with asyncio.TaskGroup() as tasks:
            if isinstance(arrivals, OpenLoop):
                for index in range(process, len(arrivals.due_s), of):
                    session = self.workload.session(index)
                    due_s = start_s + float(arrivals.due_s[index])
                    await self.clock.until(due_s)
                    tasks.create_task(self.play(session, due_s))
            else:
                await self.clock.until(start_s)
                for _ in range(process, arrivals.streams, of):
                    tasks.create_task(self._repeat(arrivals))

    async def _repeat(self, loop: ClosedLoop) -> None:
        while True:
            index = self.take()
            if loop.sessions is not None and index >= loop.sessions:
                return
            session, pause_s = self.workload.session(index), loop.pause_s(index)
            due_s = time.perf_counter() + pause_s
            if due_s >= self._end_s:
                return
            if pause_s:
                await self.clock.until(due_s)
            await self.play(session, due_s)

    async def play(self, session: Session, due_s: float) -> None:
        """Sends the turns of a session, the first at once."""
        conversation = list(session.opening)
        for number, turn in enumerate(session.turns):
            if number:
                due_s = time.perf_counter()
                if turn.think_s:
                    due_s += turn.think_s
                    await self.clock.until(min(due_s, self._end_s))
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
            return await self.client.stream(record, conversation)
        finally:
            del self._running[id(record)]
            self.finished(record)

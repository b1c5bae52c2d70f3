"""The mock server: answers each request step by step at exact times.

Every step of every answer has its time from the start, so lateness of one does not delay the next.
"""

import asyncio
import time
from array import array
from collections.abc import Iterator

from bench.load.clock import Clock
from bench.mock.answer import Request, Step, json_response
from bench.mock.behaviour import Behaviour
from bench.mock.clock import WorkClock
from bench.mock.connection import Connection
from bench.mock.requests import Requests


async def serve(behaviour: Behaviour, host: str, port: int) -> None:
    """Prints the URL and serves until it is cancelled.

    Raises:
        OSError: It cannot listen on this host and port.
    """
    loop = asyncio.get_running_loop()
    with Clock() as alarms:
        answers = _Answers(behaviour, alarms)
        listener = await loop.create_server(lambda: Connection(answers.begin), host, port, backlog=4096)
        address, bound_port = listener.sockets[0].getsockname()[:2]
        print(f"http://[{address}]:{bound_port}" if ":" in address else f"http://{address}:{bound_port}", flush=True)
        await listener.serve_forever()


class _Answers:
    """The answers being sent.

    Args:
        behaviour: How requests are answered.
        alarms: Wakes it when a step is due.
    """

    def __init__(self, behaviour: Behaviour, alarms: Clock) -> None:
        self._behaviour = behaviour
        self._alarms = alarms
        self._requests = Requests(behaviour)
        self._clock = WorkClock()
        self._stall_pending = behaviour.stall_s > 0
        self._sends: dict[str, array[float]] = {}

    def begin(self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Begins to answer a request."""
        now = time.perf_counter()
        if (method, path) == ("GET", "/sends") and self._behaviour.keep_sends:
            connection.write(json_response(200, {prompt: list(times) for prompt, times in self._sends.items()}))
            return
        start = self._clock.work(now)
        steps, request = self._requests.answer(method, path, headers, body)
        times = self._admit(request, now) if request else None
        self._send(connection, steps, next(steps), start, times)

    def _admit(self, request: Request, now: float) -> "array[float] | None":
        """Applies the effect of a request for text, read at `now`, on all answers. Returns where to keep its times."""
        if self._stall_pending:
            self._stall_pending = False
            due = now + self._behaviour.stall_at_s
            self._alarms.call_at(due, lambda: self._clock.freeze(due, self._behaviour.stall_s))
        if self._behaviour.prefill_us_per_token:
            self._clock.freeze(now, request.prompt_tokens * self._behaviour.prefill_us_per_token / 1e6)
        if not self._behaviour.keep_sends:
            return None
        times = self._sends[request.prompt] = array("d", [now])
        return times

    def _send(
        self, connection: Connection, steps: Iterator[Step], step: Step, start: float, times: "array[float] | None"
    ) -> None:
        """Sends `step` when it is due, then the other steps."""

        def act() -> None:
            nonlocal step
            now = time.perf_counter()
            if connection.closed:
                return
            if self._clock.work(now) > start + step.at_s:  # not frozen since the alarm was set
                if times is not None and step.content:
                    times.append(now)
                connection.write(step.payload)
                if step.then:
                    connection.close(reset=step.then == "reset")
                following = next(steps, None)
                if following is None:
                    return
                step = following
            self._alarms.call_at(self._clock.wall(start + step.at_s), act)

        act()

"""The streams whose decoding is watched."""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from bench.client.client import Client
from bench.errors import BenchError
from bench.record import Record
from bench.workloads.base import Message


class Decodes:
    """A number of streams that decode all the time: one that ends is started again with a new prompt.

    A context manager; its end aborts the streams.

    Args:
        client: Sends the requests.
        count: Streams at a time.
        prompt: Makes a prompt of so many tokens.
        input_len: Tokens of a prompt.
        output_len: Tokens after which a stream ends.

    Attributes:
        records: Every request so far; those that run are filled while they do.
    """

    def __init__(
        self, client: Client, count: int, prompt: Callable[[int], str], input_len: int, output_len: int
    ) -> None:
        self._client = client
        self._prompt = prompt
        self._lengths = input_len, output_len
        self.records: list[Record] = []
        self._current: list[Record | None] = [None] * count
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(stream)) for stream in range(len(self._current))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def begun(self) -> bool:
        """Every stream has had a chunk, even if it has ended since."""
        firsts = self.records[: len(self._current)]  # in the order in which the tasks were made
        return len(firsts) == len(self._current) and all(record.content_s for record in firsts)

    @property
    def stamps(self) -> Sequence[Sequence[float]]:
        """When each chunk came, by stream; one that was started again counts as another stream."""
        return [record.content_s for record in self.records]

    def decoding_since_s(self) -> float:
        """Since when all streams decode without one being started again; infinity while one waits for its first chunk.

        Raises:
            BenchError: The server refuses a stream.
        """
        self._check()
        return max(record.content_s[0] if record and record.content_s else float("inf") for record in self._current)

    def seen_until_s(self) -> float:
        """When the last chunk came of the stream that has been silent for longest: gaps before that are all known.

        Raises:
            BenchError: The server refuses a stream.
        """
        self._check()
        return min(record.content_s[-1] if record and record.content_s else 0.0 for record in self._current)

    def restarts(self, start_s: float, end_s: float) -> int:
        """How many streams were (re)started in this time."""
        return sum(start_s < record.sent_s <= end_s for record in self.records)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _keep(self, stream: int) -> None:
        input_len, output_len = self._lengths
        while True:
            message = Message("user", self._prompt(input_len))
            now_s = time.perf_counter()
            record = Record(stream, 0, input_len, output_len, now_s, now_s)
            self.records.append(record)
            self._current[stream] = record
            await self._client.stream(record, [message])
            if not record.content_s:
                raise BenchError(f"the server doesn't serve a decode stream: {record.error} {record.detail}".strip())

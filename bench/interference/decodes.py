"""The decode streams of a study."""

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
    """Streams that decode all the time. A stream that ends is started again with a new prompt.

    A context manager, which aborts the streams at its end.

    Args:
        client: Sends the requests.
        count: Number of concurrent streams.
        prompt: Makes a prompt of a given number of tokens.
        input_len: Tokens of a prompt.
        output_len: Output tokens of a stream.

    Attributes:
        records: All requests so far. Those of running requests are updated.
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
        """True if every stream has had a chunk, even if it has ended since."""
        firsts = self.records[: len(self._current)]  # in the order in which the tasks were made
        return len(firsts) == len(self._current) and all(record.content_s for record in firsts)

    @property
    def stamps(self) -> Sequence[Sequence[float]]:
        """Times of the chunks of each stream. A restarted stream counts as another stream."""
        return [record.content_s for record in self.records]

    def decoding_since_s(self) -> float:
        """Time since which all streams decode without a restart; infinity while one waits for its first chunk.

        Raises:
            BenchError: The server refuses a stream.
        """
        self._check()
        return max(record.content_s[0] if record and record.content_s else float("inf") for record in self._current)

    def seen_until_s(self) -> float:
        """Time of the last chunk of the stream that is silent for the longest. All gaps before it are known.

        Raises:
            BenchError: The server refuses a stream.
        """
        self._check()
        return min(record.content_s[-1] if record and record.content_s else 0.0 for record in self._current)

    def restarts(self, start_s: float, end_s: float) -> int:
        """Number of streams that were started or restarted in this time."""
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

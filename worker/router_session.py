"""One router's session: the messages that wait to be sent to it, and its end.

    OPEN      results, cache events and load reports are queued, and `write` sends them
    ENDED     closed by the router, superseded by a newer session of the same router, or cut off because it fell
              behind; its requests were aborted, and further messages are dropped

The engine never waits for a router. While a router is slow, outputs of several steps merge into one message, outputs of
one choice into one output, and a load report replaces the one before. A router that falls further behind than the
limits below is cut off.
"""

import asyncio
import logging

from cpd.common.stream import Stream
from cpd.rpc import cpd_pb2 as pb
from engine.types import Output
from worker.wire_format import finish_to_wire, logprobs_to_wire, output_to_wire

log = logging.getLogger(__name__)

MAX_PENDING_OUTPUTS = 100_000
MAX_PENDING_HASHES = 2_000_000
OUTPUTS_PER_MESSAGE = 2048
MESSAGES_PER_BATCH = 64


class RouterSession:
    """The session with one router. All methods run on the event loop.

    The outputs and the refusal of a request keep their order, and so do cache events.

    Attributes:
        number: Unique in this process.
        router_id: The router's name.
        ended: The reason for the session's end; empty if the router closed it.
    """

    def __init__(self, number: int, router_id: str) -> None:
        self.number = number
        self.router_id = router_id
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._results: list[pb.Output | pb.Refusal] = []
        self._unsent: dict[tuple[int, int, int], pb.Output] = {}  # outputs in _results, by request, attempt and choice
        self._num_results = 0  # before any merged
        self._cache: list[pb.CacheEvents] = []
        self._num_hashes = 0
        self._load: pb.Load | None = None
        self._filled = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    def send_output(
        self,
        request: int,
        attempt: int,
        output: Output,
        prefilled: pb.Prefilled | None = None,
        landed: pb.Landed | None = None,
    ) -> None:
        """Queues tokens.

        Args:
            prefilled: How the prompt was computed; given with the first tokens.
            landed: The pages that came from a prefill worker; given once, with later tokens.
        """
        if self.ended.done():
            return
        self._num_results += 1
        key = (request, attempt, output.choice)
        unsent = self._unsent.get(key)
        if unsent is None:
            self._unsent[key] = unsent = output_to_wire(output, request, attempt)
            if prefilled is not None:
                unsent.prefilled.CopyFrom(prefilled)
            self._results.append(unsent)
        else:
            unsent.token_ids.extend(output.token_ids)
            if output.logprobs:
                unsent.logprobs.extend(logprobs_to_wire(output.logprobs))
            if output.finish is not None:
                unsent.finish = finish_to_wire(output.finish)
        if landed is not None:
            unsent.landed.CopyFrom(landed)
        self._mark_filled()

    def refuse(self, refusal: pb.Refusal) -> None:
        """Queues a refusal."""
        if not self.ended.done():
            self._num_results += 1
            self._results.append(refusal)
            self._mark_filled()

    def send_cache(self, events: pb.CacheEvents) -> None:
        """Queues numbered cache events."""
        if not self.ended.done():
            self._cache.append(events)
            self._num_hashes += _num_hashes(events)
            self._mark_filled()

    def send_load(self, load: pb.Load) -> None:
        """Queues a load report, in place of one that still waits."""
        self._load = load
        self._mark_filled()

    def forget_cache(self, number: int) -> None:
        """Drops events up to `number`, which a snapshot includes."""
        self._cache = [events for events in self._cache if events.number > number]
        self._num_hashes = sum(map(_num_hashes, self._cache))

    def end(self, reason: str) -> None:
        """Ends the session; the first reason counts. It is empty if the router closed the session."""
        if not self.ended.done():
            self.ended.set_result(reason)

    async def write(self, stream: Stream[pb.RouterMessage]) -> None:
        """Sends queued messages as they come, until it is cancelled."""
        while True:
            for message in await self.take():
                stream.send(message)
            await stream.drained()

    async def take(self) -> list[pb.WorkerMessage]:
        """Waits for messages and takes all of them, packed into as few as possible.

        A further call tells `written` that the messages of the last one were sent.
        """
        if not self._filled.is_set():
            self._written.set()
        await self._filled.wait()
        self._filled.clear()
        results, self._results, self._num_results = self._results, [], 0
        self._unsent.clear()
        cache, self._cache, self._num_hashes = self._cache, [], 0
        load, self._load = self._load, None
        messages = _pack(results)
        messages += [pb.WorkerMessage(cache=events) for events in cache]
        if load is not None:
            messages.append(pb.WorkerMessage(load=load))
        return _batched(messages)

    async def written(self) -> None:
        """Returns when every queued message was sent."""
        await self._written.wait()

    def _mark_filled(self) -> None:
        self._filled.set()
        self._written.clear()
        if self._num_results > MAX_PENDING_OUTPUTS or self._num_hashes > MAX_PENDING_HASHES:
            log.warning("router %s reads too slowly and is cut off", self.router_id)
            self.end("the router fell too far behind")


def _pack(results: list[pb.Output | pb.Refusal]) -> list[pb.WorkerMessage]:
    messages: list[pb.WorkerMessage] = []
    run: list[pb.Output] = []

    def end_run() -> None:
        if run:
            messages.append(pb.WorkerMessage(step=pb.StepOutput(outputs=run)))
            run.clear()

    for result in results:
        if isinstance(result, pb.Refusal):
            end_run()
            messages.append(pb.WorkerMessage(refusal=result))
        else:
            run.append(result)
            if len(run) == OUTPUTS_PER_MESSAGE:
                end_run()
    end_run()
    return messages


def _batched(messages: list[pb.WorkerMessage]) -> list[pb.WorkerMessage]:
    if len(messages) == 1:
        return messages
    batches = (messages[start : start + MESSAGES_PER_BATCH] for start in range(0, len(messages), MESSAGES_PER_BATCH))
    return [pb.WorkerMessage(batch=pb.Batch(messages=batch)) for batch in batches]


def _num_hashes(events: pb.CacheEvents) -> int:
    return sum(len(event.hashes) for event in events.events) // 8

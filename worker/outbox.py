"""What waits to be written to one router.

The engine never waits for a router: outputs of several steps merge into one message while the router is slow, and those
of one choice into one output, a Load replaces the one before, and a router that falls further behind than the bounds
below is cut off.
"""

import asyncio

from cpd.rpc import cpd_pb2 as pb
from engine.types import Output
from worker.convert import finish_to_wire, logprobs_to_wire, output_to_wire

MAX_PENDING_OUTPUTS = 100_000
MAX_PENDING_HASHES = 2_000_000
OUTPUTS_PER_MESSAGE = 2048
MESSAGES_PER_BATCH = 64


class Outbox:
    """The messages for one session, in the order that matters.

    A request's outputs and refusal keep their order, and so do cache events. All methods are for the event loop.
    """

    def __init__(
        self, *, max_pending_outputs: int = MAX_PENDING_OUTPUTS, max_pending_hashes: int = MAX_PENDING_HASHES
    ) -> None:
        self._max_pending_outputs = max_pending_outputs
        self._max_pending_hashes = max_pending_hashes
        self._results: list[pb.Output | pb.Refusal] = []
        self._unsent: dict[tuple[int, int, int], pb.Output] = {}  # those in _results, by request, attempt and choice
        self._num_results = 0  # as they were put, before any merged
        self._cache: list[pb.CacheEvents] = []
        self._num_hashes = 0
        self._load: pb.Load | None = None
        self._filled = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    def overfull(self) -> bool:
        """Whether the router has fallen too far behind."""
        return self._num_results > self._max_pending_outputs or self._num_hashes > self._max_pending_hashes

    def put_output(self, request: int, attempt: int, output: Output, prefilled: pb.Prefilled | None = None) -> None:
        """Adds tokens.

        Args:
            prefilled: How the prompt was computed, with the first tokens.
        """
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
        self._mark_filled()

    def put_refusal(self, refusal: pb.Refusal) -> None:
        """Adds a refusal."""
        self._num_results += 1
        self._results.append(refusal)
        self._mark_filled()

    def put_cache(self, events: pb.CacheEvents) -> None:
        """Adds numbered cache events."""
        self._cache.append(events)
        self._num_hashes += _num_hashes(events)
        self._mark_filled()

    def put_load(self, load: pb.Load) -> None:
        """Sets the load, in place of one that still waits."""
        self._load = load
        self._mark_filled()

    def forget_cache(self, number: int) -> None:
        """Drops events up to `number`: a snapshot holds them already."""
        self._cache = [events for events in self._cache if events.number > number]
        self._num_hashes = sum(map(_num_hashes, self._cache))

    async def take(self) -> list[pb.WorkerMessage]:
        """Waits until there is something and takes it all, in as few messages as may be; the next call says that it was
        written."""
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
        """Returns when nothing waits and the writer is done with what it took."""
        await self._written.wait()

    def _mark_filled(self) -> None:
        self._filled.set()
        self._written.clear()


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

"""Lanes on a GPU: the whole device, and pairs of partitions.

    launch   copies inputs to the device, replays a graph or starts kernels, samples, copies tokens to pinned memory,
             records an event; the host does not wait
    done     queries the event
    collect  waits for the event and reads the tokens

A second step may be launched before the first is collected. The stream keeps their order and writes everything that
both use (inputs, page tables, a graph's memory). Host memory that the stream copies from is not shared between steps,
or is guarded by an event (`engine/ops/flashinfer_ops.py`).

A split's prefill lane runs on its own thread: starting a large chunk's kernels takes milliseconds and would delay the
next decode step. The thread sleeps until the chunk's event, and then starts the queued chunk.

| what                                 | owner                                   | may be used by others               |
| --- | --- | --- |
| weights, KV pool, tables             | the runner, on the default stream       | always: lanes are made after a      |
|                                      |                                         | device synchronisation              |
| pages that a step writes             | the step's sequences                    | once the step is collected          |
| pages copied by `copy_page` or to    | the full lane's stream                  | by later steps, which wait for      |
| the host                             |                                         | `PageCopies.done` on the device; by |
|                                      |                                         | other workers after `settle`        |
| ops of full and all decode lanes     | the engine's thread, one step at a time | once the step is collected          |
| ops of all prefill lanes             | the prefill thread, one step at a time  | once the step is collected          |
| graphs, their inputs and page tables | one lane                                | never                               |
| activations, logits                  | the lane's stream (torch's allocator)   | never: memory stays with its stream |
| tokens in pinned memory              | the launched step                       | until `collect` has read them       |
| tokens on the device                 | the lane, for its last step             | by the next step, if it overlaps    |
| streams of partitions                | `GreenContexts`, kept by the runner     | as long as there are lanes          |

No tensor is freed while another stream uses it, so that no other synchronisation is needed.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread

import torch

from engine.batch import Batch, IntArray, Sampled
from engine.execution.cuda.graphs import DecodeGraphs
from engine.execution.cuda.piecewise import PiecewiseGraphs
from engine.execution.executor import StepResult
from engine.execution.model_step import ModelStep
from engine.execution.sampling.sampler import ChosenTokens
from engine.ops.base import DeviceBatch
from engine.ops.buffers import upload_arrays


class PageCopies:
    """Copies pages of a pool on a stream.

    Attributes:
        done: Event of the latest copy, for which later steps wait on the device.
    """

    def __init__(self, pool: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, source: int, target: int) -> None:
        """Copies one page's keys and values of all layers."""
        with torch.cuda.stream(self._stream):
            self._pool[target].copy_(self._pool[source])
            self.done.record(self._stream)

    def settle(self) -> None:
        """Waits until all copies are complete."""
        self.done.synchronize()

    def copy_out(self, pages: Sequence[int], slots: torch.Tensor, numbers: Sequence[int]) -> None:
        """Copies pages to the slots with these numbers, in pinned memory."""
        with torch.cuda.stream(self._stream):
            for page, number in zip(pages, numbers, strict=True):
                slots[number].copy_(self._pool[page], non_blocking=True)
            self.done.record(self._stream)


class GraphStep(ModelStep):
    """Steps that replay graphs if there are any for them.

    Args:
        step: Computes the other steps.
        decodes: Graphs of steps that only decode.
        prompts: Graphs of other steps.
    """

    def __init__(self, step: ModelStep, decodes: DecodeGraphs | None, prompts: PiecewiseGraphs | None) -> None:
        super().__init__(step.model, step.kv, step.sampler, step.device)
        self._decodes = decodes
        self._prompts = prompts

    def logits(self, batch: Batch, rows: IntArray, previous: torch.Tensor | None = None) -> torch.Tensor | None:
        def fill(loaded: DeviceBatch) -> None:
            self.fill_token_ids(loaded, previous)

        if self._decodes is not None and self._decodes.fits(batch):
            hidden = self._decodes.run(batch, fill)
            if not len(rows):
                return None
            logits = self.model.head(hidden)  # with padding: cuBLAS has chosen algorithms for these sizes
            is_prefix = rows[-1] == len(rows) - 1  # rows ascend
            return logits[: len(rows)] if is_prefix else self.take_rows(logits, rows)
        if self._prompts is not None and self._prompts.fits(batch):
            every = len(rows) == len(batch.token_ids)
            sampled = self._prompts.run(batch, None if every else upload_arrays([rows], self.device)[0], fill)
            return None if sampled is None else self.model.head(sampled)
        return super().logits(batch, rows, previous)


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step.

    Attributes:
        chosen: Tokens in pinned memory, valid after `done`.
    """

    chosen: ChosenTokens | None
    done: torch.cuda.Event
    start_s: float

    def read(self) -> list[Sampled]:
        """Waits for the tokens."""
        self.done.synchronize()
        return self.chosen.read() if self.chosen else []


class CudaLane:
    """A lane that computes asynchronously. See `engine.execution.executor.Lane`.

    Args:
        step: Can be shared by lanes that never run at the same time.
        copies: Page copies for which steps wait.
        share: Share of the device.
        sleeps: True if waiting threads sleep instead of spinning, which takes about 20 µs longer.
    """

    overlaps = True

    def __init__(
        self,
        step: ModelStep,
        stream: torch.cuda.Stream,
        copies: PageCopies,
        *,
        share: float = 1.0,
        sleeps: bool = False,
    ) -> None:
        self.share = share
        self._step = step
        self._stream = stream
        self._copies = copies
        self._sleeps = sleeps
        self._launched: deque[_Step] = deque()
        self._chosen: torch.Tensor | None = None
        self._ended_s = 0.0

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        assert len(self._launched) <= (batch.token_sources is not None), "the last step was not collected"
        step = self._start(batch)
        self._launched.append(step)
        if on_done is not None:
            Thread(target=_call_when_done, args=(step.done, on_done), name="lane-done", daemon=True).start()

    def done(self) -> bool:
        return bool(self._launched) and bool(self._launched[0].done.query())  # type: ignore[no-untyped-call]

    def collect(self) -> StepResult:
        assert self._launched, "no step was launched"
        step = self._launched.popleft()
        sampled = step.read()
        start_s, self._ended_s = max(step.start_s, self._ended_s), time.perf_counter()
        return StepResult(sampled, start_s, 1e3 * (self._ended_s - start_s))

    def run(self, batch: Batch) -> list[Sampled]:
        """`launch` and `collect`, on the calling thread."""
        return self._start(batch).read()

    def _start(self, batch: Batch) -> _Step:
        start_s = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._copies.done)
            chosen = self._step.start(batch, self._chosen)
            self._chosen = chosen.token_ids if chosen else None
            on_host = chosen.to_host() if chosen else None
            done = torch.cuda.Event(blocking=self._sleeps)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Step(on_host, done, start_s)


def _call_when_done(done: torch.cuda.Event, on_done: Callable[[], None]) -> None:
    """Waits for a step without holding the GIL, then calls `on_done`."""
    try:
        done.synchronize()
    finally:
        on_done()

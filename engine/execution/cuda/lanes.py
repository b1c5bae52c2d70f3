"""Lanes on a GPU: the whole of it, and pairs of partitions.

    launch   inputs → device, graph replay or eager kernels, sampling, tokens → pinned memory, event; nobody waits
    done     asks the event
    collect  waits for the event, reads the tokens

A second step may be launched before the first is collected: the stream keeps their order, and everything that both use
(inputs, page tables, a graph's memory) is written by the stream itself. What the host writes for the stream to copy
lies in blocks of its own, or is guarded by an event (`engine/ops/flashinfer_ops.py`).

The prefill lane of a split does all of this on a thread of its own: starting the thousands of kernels of a chunk takes
milliseconds in which the decodes' next step could not be started, and the same thread then sleeps until the event. What
is queued behind a chunk it starts when it wakes from that.

| what                                 | owner, or the stream that it belongs to | others may use it                   |
| --- | --- | --- |
| weights, KV pool, tables             | the runner; written on the default      | always: the device was waited for   |
|                                      | stream                                  | before the first lane was made      |
| pages that a step writes             | the step's sequences                    | when the step has been collected    |
| pages that `copy_page` writes, and   | the full lane's stream                  | in steps launched later, which wait |
| those that are copied to the host    |                                         | `PageCopies.done`, on the device;   |
|                                      |                                         | by other workers after `settle`     |
| ops of full and all decode lanes     | the engine's thread, one step at a time | when the step has been collected    |
| ops of all prefill lanes             | the prefill thread, the same            | the same                            |
| graphs, their inputs and page tables | one lane                                | never                               |
| activations, logits                  | the lane's stream, by torch's allocator | never: memory stays with its stream |
| tokens in pinned memory              | the launched step                       | until `collect` has read them       |
| the same on the device               | the lane, of its last step              | the next one, if that overlaps      |
| streams of partitions                | `GreenContexts`, kept by the runner     | as long as there are lanes          |

So no tensor is freed that another stream still uses, and memory needs no fence but these.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread

import torch

from engine.batch import Batch, IntArray, Sampled
from engine.execution.cuda.graphs import DecodeGraphs
from engine.execution.executor import StepResult
from engine.execution.model_step import Steps
from engine.execution.sampling.sampler import Chosen


class PageCopies:
    """Copies pages of a pool on a stream.

    Attributes:
        done: What later steps on other streams wait for, on the device.
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
        """Waits until all of them are over."""
        self.done.synchronize()

    def copy_out(self, pages: Sequence[int], slots: torch.Tensor, numbers: Sequence[int]) -> None:
        """Copies pages to these of the slots, which are in pinned memory."""
        with torch.cuda.stream(self._stream):
            for page, number in zip(pages, numbers, strict=True):
                slots[number].copy_(self._pool[page], non_blocking=True)
            self.done.record(self._stream)


class GraphSteps(Steps):
    """Steps whose decodes are replayed graphs, where there is one for them."""

    def __init__(self, steps: Steps, graphs: DecodeGraphs) -> None:
        super().__init__(steps.model, steps.kv, steps.sampler, steps.device)
        self._graphs = graphs

    def logits(self, batch: Batch, rows: IntArray, before: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self._graphs.fits(batch):
            return super().logits(batch, rows, before)
        hidden = self._graphs.run(batch, lambda loaded: self.feed(loaded, before))
        if not len(rows):
            return None
        logits = self.model.head(hidden)  # of padding too: cuBLAS knows these sizes
        # Ascending rows whose last is their number less one are the first ones.
        return logits[: len(rows)] if rows[-1] == len(rows) - 1 else self.take(logits, rows)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step on its way.

    Attributes:
        chosen: In pinned memory, valid when `done`.
    """

    chosen: Chosen | None
    done: torch.cuda.Event
    start_s: float

    def read(self) -> list[Sampled]:
        """Waits for the tokens."""
        self.done.synchronize()
        return self.chosen.read() if self.chosen else []


class CudaLane:
    """Computes meanwhile, started by the caller's thread. See `engine.execution.executor.Lane`.

    Args:
        steps: May be shared by lanes that never run at the same time.
        copies: Of pages, for which steps wait.
        sleeps: Whether those who wait leave their core to others, which takes them some 20 µs longer.
    """

    overlaps = True

    def __init__(
        self, steps: Steps, stream: torch.cuda.Stream, copies: PageCopies, *, share: float = 1.0, sleeps: bool = False
    ) -> None:
        self.share = share
        self._steps = steps
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
            Thread(target=_tell, args=(step.done, on_done), name="lane-done", daemon=True).start()

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
            chosen = self._steps.start(batch, self._chosen)
            self._chosen = chosen.token_ids if chosen else None
            on_its_way = chosen.to_host() if chosen else None
            done = torch.cuda.Event(blocking=self._sleeps)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Step(on_its_way, done, start_s)


def _tell(done: torch.cuda.Event, on_done: Callable[[], None]) -> None:
    """Waits for a step, without holding the interpreter."""
    try:
        done.synchronize()
    finally:
        on_done()

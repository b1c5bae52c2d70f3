"""The contract between the engine and whatever computes its batches: launch, then collect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cpd.performance.split import LaneSplit
from engine.batch import Batch, Sampled


class StepResult(NamedTuple):
    """A step that has been computed. (A tuple, because one is made in each step.)

    Attributes:
        sampled: One a sample row, in order.
        start_s: When it began to run, by `time.perf_counter`.
        ms: How long it ran.
    """

    sampled: list[Sampled]
    start_s: float
    ms: float


class Lane(Protocol):
    """A share of the device that runs one batch at a time, with a stream, buffers and workspaces of its own.

    A lane may compute a step in `launch` (a CPU lane on the caller's thread) or meanwhile (any other). The prefill lane
    of a split takes a second step while the first one is not collected, and goes on with it at once.
    """

    @property
    def share(self) -> float:
        """Of the device's compute units; 1: all of them."""

    @property
    def overlaps(self) -> bool:
        """Whether the next decodes may be launched before the step that chooses their tokens is collected."""

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        """Starts a step. The batch belongs to the lane until `collect` has returned or raised.

        Args:
            on_done: Called when the step has been computed or has failed, on any thread.
        """

    def done(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> StepResult:
        """Waits for the launched step, the first one of two. Raises what went wrong in it."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two disjoint shares of the device, whose lanes may run at the same time."""

    prefill: Lane
    decode: Lane

    @property
    def shares(self) -> LaneSplit:
        """Of the device."""
        return LaneSplit(self.prefill.share, self.decode.share)


class Executor(Protocol):
    """Runs batches on a device that holds the weights and the KV pool.

    `full` runs only while no lane of a split does, and lanes of two splits never run at the same time.
    """

    @property
    def num_pages(self) -> int:
        """Of the pool."""

    @property
    def full(self) -> Lane:
        """The whole device."""

    @property
    def splits(self) -> Sequence[Split]:
        """Prepared ones, from the smallest decode lane to the largest; none where the device can't be divided."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's keys and values, ordered after the last collected step. No lane may write to `source`
        or use `target`. Later steps find it done; for other writers see `settle`."""

    def settle(self) -> None:
        """Returns when all copies of pages and to host memory are over: others may write into free pages then."""

"""The contract between the engine and the device that computes its batches: launch, then collect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cpd.performance.split import SplitShares
from engine.batch import Batch, Sampled


class StepResult(NamedTuple):
    """The result of a step. (A tuple, because one is made in each step.)

    Attributes:
        sampled: One token for each sample row, in order.
        start_s: Start time, from `time.perf_counter`.
        ms: Duration.
    """

    sampled: list[Sampled]
    start_s: float
    ms: float


class Lane(Protocol):
    """A fixed share of the device with its own stream, buffers and workspaces. It runs one batch at a time.

    A CPU lane on the caller's thread computes a step in `launch`; other lanes compute it in the background. The prefill
    lane of a split accepts a second step before the first one is collected, and starts it when the first one ends.
    """

    @property
    def share(self) -> float:
        """Share of the device's compute units, 0 to 1."""

    @property
    def overlaps(self) -> bool:
        """True if the next decodes may be launched before the step that samples their tokens is collected."""

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        """Starts a step. The batch belongs to the lane until `collect` has returned or raised.

        Args:
            on_done: Called on any thread when the step has been computed or has failed.
        """

    def done(self) -> bool:
        """True if `collect` would return at once."""

    def collect(self) -> StepResult:
        """Waits for the oldest launched step, and returns its result. Raises the step's error if it failed."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two disjoint shares of the device, whose lanes may run at the same time."""

    prefill: Lane
    decode: Lane

    @property
    def shares(self) -> SplitShares:
        """The lanes' shares of the device."""
        return SplitShares(self.prefill.share, self.decode.share)


class Executor(Protocol):
    """Runs batches on a device that holds the weights and the KV pool.

    The engine never uses `full` beside a lane of a split, nor lanes of two splits at the same time.
    """

    @property
    def num_pages(self) -> int:
        """Number of pages in the KV pool."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""

    @property
    def full(self) -> Lane:
        """The lane that is the whole device."""

    @property
    def splits(self) -> Sequence[Split]:
        """The prepared splits, from the smallest decode lane to the largest; empty if the device can't be divided."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's keys and values, after the last collected step and before later ones.

        No lane may write to `source` or use `target`. For other writers see `settle`.
        """

    def settle(self) -> None:
        """Waits for all copies between pages and to host memory. Then others may write into free pages."""

"""The one contract between scheduler and runner: which tokens a step computes, and where their keys and values go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cpd.split import LaneSplit
from engine.tally import Seen
from engine.types import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class SampleRow:
    """One token to sample.

    Attributes:
        row: Index into the batch's tokens, whose logits decide. Several choices may share one row.
        choice: Choice index, part of the noise's key.
        position: Position of the token to be sampled (number of tokens before it), part of the noise's key.
        tokens: All tokens before it, prompt first; in a batch that is fed, all but the last one. [position] int32
        prompt_len: How many of those are the prompt.
        seen: What is known of `tokens` from earlier steps, and is kept up by whoever samples.
    """

    row: int
    params: SamplingParams
    choice: int
    position: int
    tokens: IntArray
    prompt_len: int
    seen: Seen = field(default_factory=Seen)


@dataclass(slots=True)
class Batch:
    """One step. T tokens of S sequences; sequences with one query token (decodes) come first.

    Attributes:
        token_ids: [T]
        positions: Absolute positions. [T]
        slots: Where each token's key and value go: `page * BLOCK_SIZE + offset`. [T]
        query_start: Sequence s owns tokens `query_start[s]:query_start[s + 1]`. [S + 1]
        context_lens: Tokens that sequence s's last query attends to, itself included. [S]
        block_tables: Pages of each sequence in block order, zero beyond its context. [S, blocks of the longest]
        num_decodes: How many leading sequences have one query token.
        samples: Tokens to sample; only their rows reach the LM head.
        fed: The token ids are not known: token t is what sample `fed[t]` of the step before on this lane chooses. Such
            a step has only decodes, and none whose choice depends on which tokens came before. None: they are. [T]
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_start: IntArray
    context_lens: IntArray
    block_tables: IntArray
    num_decodes: int
    samples: list[SampleRow]
    fed: IntArray | None = None


@dataclass(slots=True)
class Sampled:
    """A chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Ran(NamedTuple):
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
    def queues(self) -> bool:
        """Whether a step may be launched that is fed by the one before it, which is not collected."""

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        """Starts a step. The batch belongs to the lane until `collect` has returned or raised.

        Args:
            on_done: Called when the step has been computed or has failed, on any thread.
        """

    def done(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> Ran:
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


class Runner(Protocol):
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

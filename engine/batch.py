"""The one contract between scheduler and runner: which tokens a step computes, and where their keys and values go."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.types import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class SampleRow:
    """One token to sample.

    Attributes:
        row: Index into the batch's tokens, whose logits decide. Several choices may share one row.
        choice: Choice index, part of the noise's key.
        position: Position of the token to be sampled (number of tokens before it), part of the noise's key.
        tokens: All tokens before it, prompt first. [position] int32
        prompt_len: How many of those are the prompt.
    """

    row: int
    params: SamplingParams
    choice: int
    position: int
    tokens: IntArray
    prompt_len: int


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
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_start: IntArray
    context_lens: IntArray
    block_tables: IntArray
    num_decodes: int
    samples: list[SampleRow]


@dataclass(slots=True)
class Sampled:
    """A chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Runs batches on a device that holds the weights and the KV pool.

    `launch` starts a step and `collect` waits for its tokens (one `Sampled` a sample row, in order), so that the
    next step can be prepared in between. On a CPU `launch` computes it all.
    """

    num_pages: int

    def launch(self, batch: Batch) -> None: ...

    def collect(self) -> list[Sampled]: ...

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's keys and values, ordered after the last collected step."""

"""What one step computes, as arrays: the data between the scheduler and the executor."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.token_counts import PenaltyCounts
from engine.types import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class SampleRow:
    """One token to sample.

    Attributes:
        row: Index into the batch's tokens, whose logits decide. Several choices may share one row.
        choice: Choice index, part of the noise's key.
        position: Position of the token to be sampled (number of tokens before it), part of the noise's key.
        tokens: All tokens before it, prompt first; all but the last one in a batch with `token_sources`.
            [position] int32
        prompt_len: How many of those are the prompt.
        counts: Of `tokens`, as counted in earlier steps; whoever samples keeps them up to date.
    """

    row: int
    params: SamplingParams
    choice: int
    position: int
    tokens: IntArray
    prompt_len: int
    counts: PenaltyCounts = field(default_factory=PenaltyCounts)


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
        token_sources: For a step launched before the last one's tokens are known: token t is what sample
            `token_sources[t]` of that step, on the same lane, chooses. All sequences decode, and no choice depends on
            which tokens came before (penalties). None: `token_ids` are known. [T]
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_start: IntArray
    context_lens: IntArray
    block_tables: IntArray
    num_decodes: int
    samples: list[SampleRow]
    token_sources: IntArray | None = None


@dataclass(slots=True)
class Sampled:
    """A chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None = None

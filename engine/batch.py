"""A step as arrays: the data between the scheduler and the executor."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cpd.grammar.constraint import TokenConstraint
from engine.token_counts import PenaltyCounts
from engine.types import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class SampleRow:
    """One token to sample.

    Attributes:
        row: Index of the batch's token whose logits are sampled. Several choices may share one row.
        choice: Choice index, part of the noise's key.
        position: Position of the token to be sampled (number of tokens before it), part of the noise's key.
        tokens: All tokens before it, prompt first. In a batch with `token_sources` the last one is not valid yet.
            [position] int32
        prompt_len: Number of tokens of the prompt.
        counts: Counts of `tokens`. The sampler keeps them up to date.
        constraint: Of the output up to here, if it must follow a grammar. The sampler only reads it.
    """

    row: int
    params: SamplingParams
    choice: int
    position: int
    tokens: IntArray
    prompt_len: int
    counts: PenaltyCounts = field(default_factory=PenaltyCounts)
    constraint: TokenConstraint | None = None


@dataclass(slots=True)
class Batch:
    """One step: T tokens of S sequences. Sequences with one query token (decodes) come first.

    Attributes:
        token_ids: [T]
        positions: Absolute positions. [T]
        slots: Slot for each token's key and value: `page * BLOCK_SIZE + offset`. [T]
        query_start: Sequence s owns tokens `query_start[s]:query_start[s + 1]`. [S + 1]
        context_lens: Number of tokens that sequence s's last query attends to, itself included. [S]
        block_tables: Pages of each sequence in block order, zero beyond its context. [S, blocks of the longest]
        num_decodes: Number of leading sequences that have one query token.
        samples: Tokens to sample. Only their rows reach the LM head.
        token_sources: Set in a step that is launched before the tokens of the last one on its lane are known: token t
            is the token of that step's sample `token_sources[t]`. All sequences decode, without penalties or
            grammars. None if `token_ids` are known. [T]
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
    """A sampled token.

    Attributes:
        logprobs: If the row asked for them.
        replacement: Those of the token that the row's constraint may put in its place; None if it will not.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    replacement: TokenLogprobs | None = None

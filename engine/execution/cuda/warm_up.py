"""Steps that run before serving, on a spare page that belongs to no sequence.

They compile and load kernels, and torch keeps the memory that they allocate. If the device has too little memory, the
worker fails while it starts, not while it serves.
"""

from dataclasses import replace

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Batch, SampleRow
from engine.execution.cuda.graphs import padding
from engine.execution.executor import Lane
from engine.types import SamplingParams

_EVERYTHING = SamplingParams(
    temperature=0.5, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, top_logprobs=20
)
"""Sampling with the largest use of memory."""


def run(lane: Lane, batch: Batch) -> None:
    """Computes one step."""
    lane.launch(batch)
    lane.collect()


def run_largest(lane: Lane, tokens: int, seqs: int, max_model_len: int, spare_page: int) -> None:
    """Computes the largest possible steps: one of `tokens` prompt tokens, and one of `seqs` decodes."""
    run(lane, prompts(tokens, max_model_len, spare_page))
    run(lane, decodes(seqs, spare_page))


def prompts(tokens: int, max_model_len: int, spare_page: int) -> Batch:
    """Makes a step of the fewest prompts that have `tokens` tokens in total. Each samples a token."""
    whole, rest = divmod(tokens, max_model_len)
    lengths = np.array([rest] * (rest > 0) + [max_model_len] * whole, np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    params = SamplingParams(temperature=1.0, seed=0)
    return Batch(
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        slots=spare_page * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=np.concatenate(([0], ends)).astype(np.int32),
        context_lens=lengths,
        block_tables=np.full((len(lengths), blocks_for(int(lengths.max()))), spare_page, np.int32),
        num_decodes=int((lengths == 1).sum()),
        samples=[
            SampleRow(end - 1, params, 0, length, np.zeros(length, np.int32), length)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ],
    )


def decodes(seqs: int, spare_page: int) -> Batch:
    """Makes a step of decodes that use every sampling parameter."""
    token = np.zeros(1, np.int32)
    return replace(
        padding(seqs, spare_page), samples=[SampleRow(row, _EVERYTHING, 0, 1, token, 1) for row in range(seqs)]
    )

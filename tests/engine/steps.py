"""Random steps over a pool of scattered pages, for tests of single operations."""

from collections.abc import Sequence

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Batch
from engine.ops.base import DeviceBatch

Lens = Sequence[tuple[int, int]]
"""Query tokens and context tokens of each sequence."""


def lay_out(lens: Lens, rng: np.random.Generator) -> tuple[list[list[int]], int]:
    """Returns each sequence's pages, in random order, and the size of a pool for all (a few pages stay unused)."""
    counts = [blocks_for(context) for _, context in lens]
    order = iter(rng.permutation(sum(counts) + 3).tolist())
    return [[next(order) for _ in range(count)] for count in counts], sum(counts) + 3


def step_of(lens: Lens, pages: Sequence[Sequence[int]]) -> DeviceBatch:
    """Makes a step over sequences in these pages. Decodes must come first."""
    tables = np.zeros((len(lens), max(len(row) for row in pages) + 1), np.int32)
    positions: list[int] = []
    slots: list[int] = []
    for table, row, (queries, context) in zip(tables, pages, lens, strict=True):
        table[: len(row)] = row
        span = range(context - queries, context)
        positions += span
        slots += [row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
    host = Batch(
        token_ids=np.zeros(len(slots), np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        query_start=np.cumsum([0, *(queries for queries, _ in lens)], dtype=np.int32),
        context_lens=np.array([context for _, context in lens], np.int32),
        block_tables=tables,
        num_decodes=sum(queries == 1 for queries, _ in lens),
        samples=[],
    )
    return DeviceBatch.of(host, torch.device("cpu"))

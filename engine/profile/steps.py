"""Steps to measure, and their batches for a runner."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.performance.model import Work
from engine.batch import Batch, SampleRow
from engine.execution.executor import Executor, Lane
from engine.types import SamplingParams

RunStep = Callable[["Step"], float]
"""Runs a step and returns its time in ms."""


@dataclass(frozen=True, slots=True)
class Step:
    """Shape of a step.

    Attributes:
        chunks: Computed tokens and cached tokens of each sequence. Sequences that compute one token come first.
    """

    chunks: tuple[tuple[int, int], ...]

    @classmethod
    def decode(cls, seqs: int, context_each: int) -> Self:
        """Makes a step of one token for each of `seqs` sequences, including which each has `context_each` tokens."""
        return cls(((1, context_each - 1),) * seqs)

    @classmethod
    def prefill(cls, tokens: int, before: int = 0) -> Self:
        """Makes a step of `tokens` tokens of one sequence that has `before` cached tokens."""
        return cls(((tokens, before),))

    def __add__(self, other: "Step") -> "Step":
        return Step(tuple(sorted(self.chunks + other.chunks, key=lambda chunk: chunk[0] > 1)))

    @property
    def work(self) -> Work:
        """The step as work of the performance model."""
        return Work.total(Work.prefill(tokens, before) for tokens, before in self.chunks)

    @property
    def pages(self) -> int:
        """Number of pages that the sequences need."""
        return sum(blocks_for(tokens + before) for tokens, before in self.chunks)


class StepBatches:
    """Makes batches of random tokens over scattered pages of a runner's pool, with arbitrary content.

    Tokens must differ: those that are alike are computed by the same experts, so that a step reads fewer weights.

    Args:
        skip: Number of pages left to the other lane.
    """

    def __init__(self, runner: Executor, skip: int = 0) -> None:
        self._runner = runner
        self._order = np.random.default_rng(0).permutation(runner.num_pages).astype(np.int32)[skip:]
        self._touched = 1
        self._tokens = np.random.default_rng(0)

    def make(self, step: Step) -> Batch:
        """Makes a batch. Each sequence samples one token with default parameters.

        Raises:
            ValueError: The pool has too few pages.
        """
        if step.pages > len(self._order):
            raise ValueError(f"a step of {step.pages} pages does not fit into {len(self._order)} pages")
        self._touch(step.pages)
        counts, befores = np.array(step.chunks, np.int32).T
        contexts = befores + counts
        tables = np.zeros((len(counts), blocks_for(int(contexts.max()))), np.int32)
        first = 0
        for table, context in zip(tables, contexts.tolist(), strict=True):
            table[: blocks_for(context)] = self._order[first : first + blocks_for(context)]
            first += blocks_for(context)
        ends = list(accumulate(counts.tolist()))
        query_start = np.array([0, *ends], np.int32)
        seqs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        positions = np.arange(ends[-1], dtype=np.int32) + (befores - query_start[:-1])[seqs]
        return Batch(
            token_ids=self._tokens.integers(self._runner.vocab_size, size=ends[-1], dtype=np.int32),
            positions=positions,
            slots=tables[seqs, positions // BLOCK_SIZE] * np.int32(BLOCK_SIZE) + positions % BLOCK_SIZE,
            query_start=query_start,
            context_lens=contexts,
            block_tables=tables,
            num_decodes=int((counts == 1).sum()),
            samples=[
                SampleRow(end - 1, SamplingParams(), 0, context, np.zeros(context, np.int32), context)
                for end, context in zip(ends, contexts.tolist(), strict=True)
            ],
        )

    def _touch(self, pages: int) -> None:
        """Writes to the first `pages` pages: memory that was never written may read faster."""
        for page in self._order[self._touched : pages].tolist():
            self._runner.copy_page(int(self._order[0]), page)
        self._touched = max(self._touched, pages)


def step_timer(lane: Lane, batches: StepBatches) -> RunStep:
    """Returns a function that runs steps on one lane."""

    def run(step: Step) -> float:
        lane.launch(batches.make(step))
        return lane.collect().ms

    return run

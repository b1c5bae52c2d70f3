"""Steps to be measured, and the batches that a runner takes."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.performance.model import Work
from engine.batch import Batch, SampleRow
from engine.execution.executor import Executor, Lane
from engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes.

    Attributes:
        chunks: Of each sequence: tokens computed, and tokens before them in the cache. Those of one token come first.
    """

    chunks: tuple[tuple[int, int], ...]

    @classmethod
    def decode(cls, seqs: int, context_each: int) -> Self:
        """One token for each of `seqs` sequences, each of which then has `context_each` tokens."""
        return cls(((1, context_each - 1),) * seqs)

    @classmethod
    def prefill(cls, tokens: int, before: int = 0) -> Self:
        """A chunk of one sequence."""
        return cls(((tokens, before),))

    def __add__(self, other: "Step") -> "Step":
        return Step(tuple(sorted(self.chunks + other.chunks, key=lambda chunk: chunk[0] > 1)))

    @property
    def work(self) -> Work:
        """The same for the performance model."""
        return Work.total(Work.prefill(tokens, before) for tokens, before in self.chunks)

    @property
    def pages(self) -> int:
        """Pages that its sequences need."""
        return sum(blocks_for(tokens + before) for tokens, before in self.chunks)


class StepBatches:
    """Makes batches over scattered pages of a runner's pool, whose content does not matter.

    Args:
        skip: Pages that are left to the other lane.
    """

    def __init__(self, runner: Executor, skip: int = 0) -> None:
        self._runner = runner
        self._order = np.random.default_rng(0).permutation(runner.num_pages).astype(np.int32)[skip:]
        self._touched = 1

    def make(self, step: Step) -> Batch:
        """A batch of `step`. Each of its sequences samples one token, as a request does that says nothing about it.

        Raises:
            ValueError: The pool has too few pages.
        """
        if step.pages > len(self._order):
            raise ValueError(f"a step over {step.pages} pages does not fit into {len(self._order)} of them")
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
            token_ids=np.zeros(ends[-1], np.int32),
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
        """Writes to the first `pages` pages: memory that nobody has written to may read faster than any other."""
        for page in self._order[self._touched : pages].tolist():
            self._runner.copy_page(int(self._order[0]), page)
        self._touched = max(self._touched, pages)


class StepTimer:
    """Runs steps on one lane, and takes the time."""

    def __init__(self, lane: Lane, batches: StepBatches) -> None:
        self._lane = lane
        self._batches = batches

    def __call__(self, step: Step) -> float:
        """ms that it ran."""
        self._lane.launch(self._batches.make(step))
        return self._lane.collect().ms

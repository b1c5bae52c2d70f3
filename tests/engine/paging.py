"""Hand-built batches: page bookkeeping for tests that drive a runner without a scheduler."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Batch, Sampled, SampleRow
from engine.execution.executor import Executor
from engine.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Running:
    """A sequence: its tokens so far, how many of them are computed, and the pages they lie in."""

    tokens: list[int]
    prompt_len: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Pager:
    """Hands out pages in random order, so that a sequence's pages are scattered over the pool."""

    def __init__(self, runner: Executor, seed: int = 0) -> None:
        self._runner = runner
        self._free = list(range(runner.num_pages))
        random.Random(seed).shuffle(self._free)

    def start(self, prompt: Sequence[int]) -> Running:
        return Running(list(prompt), len(prompt))

    def release(self, sequence: Running) -> None:
        self._free.extend(sequence.pages)
        sequence.pages = []

    def step(self, parts: Sequence[tuple[Running, int]], padding: int = 0) -> list[Sampled]:
        """Computes the next `n` tokens of each sequence in one batch; one that is complete then gets a new token."""
        batch = self.batch(parts, padding)
        self._runner.full.launch(batch)
        sampled = self._runner.full.collect().sampled
        ready = [sequence for sequence, _ in self._ordered(parts) if sequence.remaining == 0]
        for sequence, token in zip(ready, sampled, strict=True):
            sequence.tokens.append(token.token_id)
        return sampled

    def generate(self, sequence: Running, count: int, chunk: int = 1 << 30) -> list[int]:
        """Runs one sequence alone until it has `count` new tokens; the prompt goes in chunks."""
        while len(sequence.output) < count:
            self.step([(sequence, min(chunk, sequence.remaining))])
        return sequence.output

    def batch(self, parts: Sequence[tuple[Running, int]], padding: int = 0) -> Batch:
        """The batch of `step`; its sequences count as computed from then on."""
        ordered = self._ordered(parts)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts, samples = [0], [], []
        for sequence, n in ordered:
            first, last = sequence.num_computed, sequence.num_computed + n
            while len(sequence.pages) < blocks_for(last):
                sequence.pages.append(self._free.pop())
            tokens += sequence.tokens[first:last]
            positions += range(first, last)
            slots += [sequence.pages[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)]
            starts.append(len(tokens))
            contexts.append(last)
            sequence.num_computed = last
            if sequence.remaining == 0:
                history = np.array(sequence.tokens, np.int32)
                samples.append(SampleRow(len(tokens) - 1, GREEDY, 0, last, history, sequence.prompt_len))
        tables = np.zeros((len(ordered), max(blocks_for(c) for c in contexts) + padding), np.int32)
        for row, (sequence, _) in enumerate(ordered):
            used = sequence.pages[: blocks_for(contexts[row])]
            tables[row, : len(used)] = used
        return Batch(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            query_start=np.array(starts, np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables,
            num_decodes=sum(n == 1 for _, n in ordered),
            samples=samples,
        )

    @staticmethod
    def _ordered(parts: Sequence[tuple[Running, int]]) -> list[tuple[Running, int]]:
        return sorted(parts, key=lambda part: part[1] != 1)

"""What one step computes, and the batch it makes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cpd.blocks import BLOCK_SIZE, blocks_for
from cpd.perfmodel import Work
from engine.batch import Batch, IntArray, SampleRow
from engine.sequence import Seq, SeqTable


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. start + count - 1` of a sequence.

    Attributes:
        choices: The sequence's, as of the launch: some may be ended while the chunk runs.
        samples: Whether it ends with the sequence's last token, so that the next one is chosen.
    """

    seq: Seq
    start: int
    count: int
    choices: list[int]
    samples: bool


@dataclass(slots=True)
class Plan:
    """What a lane computes in one step: chunks of one token first, then longer ones.

    Attributes:
        fed: See `engine.batch.Batch.fed`.
    """

    singles: list[Chunk] = field(default_factory=list)
    longer: list[Chunk] = field(default_factory=list)
    fed: IntArray | None = None

    def add(self, seq: Seq, start: int, count: int) -> None:
        """Computes some tokens of a sequence; those before them have been computed by then."""
        samples = start + count == seq.num_tokens
        (self.singles if count == 1 else self.longer).append(Chunk(seq, start, count, seq.choices, samples))

    @property
    def chunks(self) -> list[Chunk]:
        """All of them, in the batch's order."""
        return self.singles + self.longer if self.longer else self.singles

    @property
    def work(self) -> Work:
        """As far as its time goes."""
        count = len(self.singles)
        decodes = Work.decode(count, sum([chunk.start for chunk in self.singles]) + count)
        return sum([Work.prefill(chunk.count, chunk.start) for chunk in self.longer], decodes)

    def __bool__(self) -> bool:
        return bool(self.singles or self.longer)


BuildBatch = Callable[[Plan, SeqTable], Batch]


def build_batch(plan: Plan, table: SeqTable) -> Batch:
    """The arrays of a step. Samples are in the order of chunks, then of choices."""
    chunks = plan.chunks
    size = len(chunks)
    rows = np.fromiter((chunk.seq.row for chunk in chunks), np.int32, size)
    starts = np.fromiter((chunk.start for chunk in chunks), np.int32, size)
    if plan.longer:
        counts = np.fromiter((chunk.count for chunk in chunks), np.int32, size)
        query_start = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        token_rows = np.repeat(rows, counts)
        context_lens = starts + counts
    else:
        query_start = np.arange(size + 1, dtype=np.int32)
        positions, token_rows, context_lens = starts, rows, starts + np.int32(1)
    pages = table.pages[token_rows, positions // BLOCK_SIZE]
    block_tables: IntArray = table.pages[rows, : blocks_for(int(context_lens.max()))]
    samples: list[SampleRow] = []
    for s, (chunk, after) in enumerate(zip(chunks, query_start[1:].tolist(), strict=True)):
        if chunk.samples:
            seq, request = chunk.seq, chunk.seq.request
            position = chunk.start + chunk.count
            tokens = table.tokens[seq.row, :position]
            for choice in chunk.choices:
                samples.append(
                    SampleRow(after - 1, request.params, choice, position, tokens, request.prompt_len, seq.seen)
                )
        else:  # it holds the pages of its later chunks already
            block_tables[s, blocks_for(chunk.start + chunk.count) :] = 0
    return Batch(
        token_ids=table.tokens[token_rows, positions],
        positions=positions,
        slots=pages * np.int32(BLOCK_SIZE) + positions % BLOCK_SIZE,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        num_decodes=len(plan.singles),
        samples=samples,
        fed=plan.fed,
    )

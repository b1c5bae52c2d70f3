"""The plan of a step, and the batch that is built from it.

`scheduler.py` fills plans; the sizes of their chunks come from the budget of `cpd/performance/colocation.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.performance.model import Work
from engine.batch import Batch, IntArray, SampleRow
from engine.scheduling.sequence import Sequence, SequenceTable

MAX_DECODE_TOKENS = BLOCK_SIZE
"""Most tokens of a decode: a sampled one, and those that its grammar forces behind it. A sequence that decodes needs no
more than one page a step."""


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. start + num_tokens - 1` of a sequence.

    Attributes:
        num_samples: Number of the last tokens after which a token is sampled: 1 in a decode and in a prompt's last
            chunk, 0 in a prompt's other chunks.
        choices: The sequence's choices at the launch. Some may end while the chunk is computed.
    """

    seq: Sequence
    start: int
    num_tokens: int
    num_samples: int
    choices: list[int]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """True if it is short enough for a decode, and a token is sampled after it."""
        return self.num_samples > 0 and self.num_tokens <= MAX_DECODE_TOKENS


@dataclass(slots=True)
class Plan:
    """What a lane computes in one step.

    Attributes:
        decodes: Chunks of one token. Some may be the rest of a prompt: attention computes both in the same way. They
            come first in the batch.
        prefills: Longer chunks, of prompts and of decodes with tokens that a grammar forced.
        token_sources: See `engine.batch.Batch`.
        work: The plan's work, from which the performance model predicts its time.
    """

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    token_sources: IntArray | None = None
    work: Work = field(init=False, default_factory=Work)

    def __post_init__(self) -> None:
        if count := len(self.decodes):
            self.work = Work.decode(count, sum([chunk.start for chunk in self.decodes]) + count)
        for chunk in self.prefills:
            self.work += Work.prefill(chunk.num_tokens, chunk.start)

    def add(self, seq: Sequence, start: int, num_tokens: int) -> None:
        """Adds a chunk. The tokens before it must be computed by then."""
        num_samples = int(start + num_tokens == seq.num_tokens)
        chunks = self.decodes if num_tokens == 1 else self.prefills
        chunks.append(Chunk(seq, start, num_tokens, num_samples, seq.choices))
        self.work += Work.prefill(num_tokens, start)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the batch's order."""
        return self.decodes + self.prefills if self.prefills else self.decodes

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


BuildBatch = Callable[[Plan, SequenceTable], Batch]


def build_batch(plan: Plan, table: SequenceTable) -> Batch:
    """Builds the arrays of a step. Samples are in the order of chunks, then of choices, then of positions."""
    chunks = plan.chunks
    size = len(chunks)
    rows = np.array([chunk.seq.row for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    if plan.prefills:
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int32)
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
        if not chunk.num_samples:  # the sequence has the pages of its later chunks already
            block_tables[s, blocks_for(chunk.end) :] = 0
            continue
        seq, request, tokens = chunk.seq, chunk.seq.request, table.rows[chunk.seq.row]
        for choice in chunk.choices:
            for back in range(chunk.num_samples, 0, -1):
                end = chunk.end + 1 - back
                samples.append(
                    SampleRow(
                        after - back,
                        request.params,
                        choice,
                        end,
                        tokens[:end],
                        request.prompt_len,
                        seq.counts,
                        seq.constraint,
                    )
                )
    return Batch(
        token_ids=table.tokens[token_rows, positions],
        positions=positions,
        slots=pages * np.int32(BLOCK_SIZE) + positions % BLOCK_SIZE,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        num_decodes=len(plan.decodes),
        samples=samples,
        token_sources=plan.token_sources,
    )

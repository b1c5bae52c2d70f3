"""Sequences, and the table with the tokens and pages of the running ones.

    WAITING ──scheduled──▶ RUNNING ──finished or aborted──▶ FINISHED
      │                     │   ▲
      ▼           preempted ▼   │ scheduled again
    WAITING_FOR_PREFIX ──▶ RESUMABLE
                  woken

A sequence in WAITING_FOR_PREFIX waits for a block that is being computed, received or loaded. RESUMABLE sequences were
scheduled before, and go before new ones. A sequence has a row of the table, and pages, only while it is RUNNING.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.grammar.constraint import TokenConstraint
from cpd.performance.model import Work
from engine.batch import IntArray
from engine.token_counts import PenaltyCounts
from engine.types import Request


class SequenceState(Enum):
    """State of a sequence (see the module)."""

    WAITING = auto()
    WAITING_FOR_PREFIX = auto()
    RESUMABLE = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A whole request until its prompt is computed, then one of its choices.

    The output processor changes `choices`, `first_token_sent` and `constraint`, samplers change `counts`; everything
    else belongs to the scheduler.

    Attributes:
        choices: Indices of all the request's choices until the prompt is computed, then of one.
        order: Age; older sequences are scheduled first and preempted last.
        hashes: Hashes of the full blocks, as far as known.
        tokens: All tokens while it has no row, else None.
        num_tokens: Number of known tokens.
        counts: Counts of its tokens, for penalties.
        constraint: Of its output so far, if that must follow a grammar; it survives a preemption.
        first_token_sent: True after its first output.
        queued: True if it was never scheduled; it then counts against the queue limit.
        parked: True if it has lost its pages to a model that needed the memory.
        work: Work to compute it, as estimated when it came.
        queued_s: Time until it was first scheduled.
        lane_chunks: Number of its chunks on the prefill lane that are not collected.
        row: Row of the table while running, else -1.
        num_computed: Number of tokens whose keys and values are in the pages.
        num_pages: Number of its blocks that have or had a page.
        num_released: Number of leading blocks whose pages it no longer holds, because all attention windows end after
            them.
        num_published: Number of leading blocks that it has published, or found in the cache.
        cached_tokens: Number of prompt tokens found in the cache when it was first scheduled.
    """

    request: Request
    choices: list[int]
    order: tuple[int, int]
    hashes: list[bytes]
    tokens: IntArray | None
    num_tokens: int
    counts: PenaltyCounts = field(default_factory=PenaltyCounts)
    constraint: TokenConstraint | None = None
    first_token_sent: bool = False
    state: SequenceState = SequenceState.WAITING
    queued: bool = False
    parked: bool = False
    work: Work = field(default_factory=Work)
    queued_s: float = 0.0
    lane_chunks: int = 0
    row: int = -1
    num_computed: int = 0
    num_pages: int = 0
    num_released: int = 0
    num_published: int = 0
    cached_tokens: int = 0


class SequenceTable:
    """Tokens and pages of the running sequences, one row each, so that batches are built by array operations.

    Attributes:
        max_len: Maximum tokens of a sequence.
        tokens: [rows, max_len] int32
        pages: Pages in block order, zero where a sequence holds none. [rows, blocks of the longest sequence] int32
        rows: Views of the rows of `tokens`. [max_len] each
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        self.max_len = max_len
        self.tokens: IntArray = np.zeros((num_rows, max_len), dtype=np.int32)
        self.pages: IntArray = np.zeros((num_rows, blocks_for(max_len)), dtype=np.int32)
        self.rows = list(self.tokens)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        """Number of free rows."""
        return len(self._free_rows)

    def enter(self, seq: Sequence, pages: list[int]) -> None:
        """Gives a sequence a row for its tokens and these pages, which follow those that it has released. There must be
        a free row."""
        if seq.tokens is None:
            raise AssertionError("the sequence has a row already")
        seq.row = self._free_rows.pop()
        self.tokens[seq.row, : seq.num_tokens] = seq.tokens
        seq.tokens, seq.num_pages = None, seq.num_released + len(pages)
        self.pages[seq.row, seq.num_released : seq.num_pages] = pages

    def leave(self, seq: Sequence) -> list[int]:
        """Takes a sequence's row back, but not its tokens. Returns its pages, which the caller must release."""
        pages = self.pages_of(seq)
        seq.tokens = self.tokens_of(seq).copy()
        self.pages[seq.row, : seq.num_pages] = 0
        self._free_rows.append(seq.row)
        seq.row, seq.num_pages, seq.num_released, seq.num_computed, seq.num_published = -1, 0, 0, 0, 0
        return pages

    def add_pages(self, seq: Sequence, pages: list[int]) -> None:
        """Appends pages to a sequence."""
        self.pages[seq.row, seq.num_pages : seq.num_pages + len(pages)] = pages
        seq.num_pages += len(pages)

    def take_first(self, seq: Sequence, blocks: int) -> list[int]:
        """Takes the pages of a sequence's first blocks away from it. The caller must release them."""
        pages: list[int] = self.pages[seq.row, seq.num_released : blocks].tolist()
        self.pages[seq.row, seq.num_released : blocks] = 0
        seq.num_released = blocks
        return pages

    def tokens_of(self, seq: Sequence) -> IntArray:
        """A view of a sequence's tokens. [num_tokens]"""
        return self.tokens[seq.row, : seq.num_tokens]

    def pages_of(self, seq: Sequence) -> list[int]:
        """The pages that a sequence holds."""
        pages: list[int] = self.pages[seq.row, seq.num_released : seq.num_pages].tolist()
        return pages

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless rows and sequences agree."""
        rows = [seq.row for seq in running]
        if sorted(rows + self._free_rows) != list(range(self.num_rows)):
            raise AssertionError("rows and running sequences disagree")
        for row in self._free_rows:
            if self.pages[row].any():
                raise AssertionError(f"row {row} is free but has pages")
        for seq in running:
            held = slice(seq.num_released, seq.num_pages)
            if seq.num_pages * BLOCK_SIZE < seq.num_computed or np.delete(self.pages[seq.row], held).any():
                raise AssertionError(f"the pages of row {seq.row} are not those of its sequence")

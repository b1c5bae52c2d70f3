"""Sequences, and the arrays that hold what the running ones consist of.

    QUEUED ──its turn──▶ RUNNING ──finished or aborted──▶ FINISHED
      │                   │   ▲
      ▼         preempted ▼   │ admitted again
    PARKED ──woken──▶ RETURNING

A PARKED sequence waits until a block is published that somebody else is filling. RETURNING ones have had their turn
and come before the queue. A sequence has a row of the table, and pages, exactly while it is RUNNING.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from cpd.blocks import BLOCK_SIZE, blocks_for
from cpd.perfmodel import Work
from engine.batch import IntArray
from engine.tally import Seen
from engine.types import Request


class State(Enum):
    """Where a sequence is in its life."""

    QUEUED = auto()
    PARKED = auto()
    RETURNING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Seq:
    """Tokens being computed: a whole request until its prompt is computed, then one of its choices.

    Attributes:
        choices: One, or all of the request's before the prompt is computed.
        order: Age, for who comes first and who is preempted first.
        hashes: Of the full blocks, as far as known.
        tokens: All tokens while it has no row.
        num_tokens: Known tokens.
        seen: For its penalties.
        reported: Whether its first output went out.
        queued: Never admitted so far; counts against the queue's bound.
        work: What was to be computed when it came; the cache may have more or less of it by its first turn.
        queued_s: How long it waited for its first turn.
        aside: The prefill lane computes a chunk of it.
        row: In the table, while running.
        num_computed: Tokens whose keys and values are in the pages.
        num_pages: Pages it holds.
        num_published: Leading blocks that it has published, or found to be so.
        cached_tokens: Prompt tokens found in the cache at the first admission.
    """

    request: Request
    choices: list[int]
    order: tuple[int, int]
    hashes: list[bytes]
    tokens: IntArray | None
    num_tokens: int
    seen: Seen = field(default_factory=Seen)
    reported: bool = False
    state: State = State.QUEUED
    queued: bool = False
    work: Work = field(default_factory=Work)
    queued_s: float = 0.0
    aside: bool = False
    row: int = -1
    num_computed: int = 0
    num_pages: int = 0
    num_published: int = 0
    cached_tokens: int = 0


class SeqTable:
    """Tokens and pages of the running sequences, one row each, so that batches are built by array operations.

    Attributes:
        max_len: Tokens of the longest sequence.
        tokens: [rows, max_len] int32
        pages: In block order, zero beyond a sequence's last page. [rows, blocks of the longest sequence] int32
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
        """Sequences that can still start."""
        return len(self._free_rows)

    def enter(self, seq: Seq, pages: list[int]) -> None:
        """Gives a sequence a row, with its tokens and these pages. There must be a free row."""
        if seq.tokens is None:
            raise AssertionError("the sequence has a row already")
        seq.row = self._free_rows.pop()
        self.tokens[seq.row, : seq.num_tokens] = seq.tokens
        self.pages[seq.row, : len(pages)] = pages
        seq.tokens, seq.num_pages = None, len(pages)

    def leave(self, seq: Seq) -> list[int]:
        """Takes the row back; the sequence keeps its tokens. Returns its pages, which are the caller's to release."""
        pages = self.pages_of(seq)
        seq.tokens = self.tokens_of(seq).copy()
        self.pages[seq.row, : seq.num_pages] = 0
        self._free_rows.append(seq.row)
        seq.row, seq.num_pages, seq.num_computed, seq.num_published = -1, 0, 0, 0
        return pages

    def add_token(self, seq: Seq, token_id: int) -> None:
        """Appends a token."""
        self.rows[seq.row][seq.num_tokens] = token_id
        seq.num_tokens += 1

    def add_pages(self, seq: Seq, pages: list[int]) -> None:
        """Appends pages."""
        self.pages[seq.row, seq.num_pages : seq.num_pages + len(pages)] = pages
        seq.num_pages += len(pages)

    def tokens_of(self, seq: Seq) -> IntArray:
        """A view of a sequence's tokens. [num_tokens]"""
        return self.tokens[seq.row, : seq.num_tokens]

    def pages_of(self, seq: Seq) -> list[int]:
        """A sequence's pages."""
        pages: list[int] = self.pages[seq.row, : seq.num_pages].tolist()
        return pages

    def check_integrity(self, running: Iterable[Seq]) -> None:
        """Raises AssertionError unless rows and sequences agree."""
        rows = [seq.row for seq in running]
        if sorted(rows + self._free_rows) != list(range(self.num_rows)):
            raise AssertionError("rows and running sequences disagree")
        for row in self._free_rows:
            if self.pages[row].any():
                raise AssertionError(f"row {row} is free but has pages")
        for seq in running:
            if seq.num_pages * BLOCK_SIZE < seq.num_computed or self.pages[seq.row, seq.num_pages :].any():
                raise AssertionError(f"row {seq.row} has other pages than its sequence")
